"""The libraries whose environments have names: `gymnasium:ID` and `verifiers:NAME`."""

from __future__ import annotations

from functools import partial

from agentenv.core.errors import UsageError
from agentenv.envs.spec import EnvSpec
from agentenv.envs.worlds import World, held_out_seeds, train_seeds

__all__ = ["GYMNASIUM", "VERIFIERS"]


def _gymnasium(id: str) -> EnvSpec:
    from agentenv.envs.adapters.gym import GymnasiumText, known

    known(id)
    return EnvSpec.of(
        f"gymnasium/{id.replace('/', '.')}",
        GymnasiumText,
        kwargs={"env": id},
        tasks={"train": train_seeds, "test": held_out_seeds},
        description=f"{id} of Gymnasium, played in text",
    )


def _verifiers(name: str) -> EnvSpec:
    from agentenv.envs.adapters.verifiers import Verifiers, rows, splits

    if not name:
        raise UsageError("verifiers: names no environment", remedy="write it as in verifiers:wordle")
    return EnvSpec.of(
        f"verifiers/{name.replace('/', '.')}-v0",
        Verifiers,
        kwargs={"source": name},
        tasks={split: partial(rows, name, split) for split in splits(name)},
        description=f"{name} of verifiers",
    )


GYMNASIUM = World(_gymnasium, "ID", description="text and small discrete environments of Gymnasium")
VERIFIERS = World(
    _verifiers, "NAME", ("verifiers",), "pip install 'verifiers<0.4'", "environments of verifiers"
)
