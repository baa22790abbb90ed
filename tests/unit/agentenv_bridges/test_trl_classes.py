"""A class for TRL, played by TRL's own trainer and by ours: the same tools, prompts, completions and rewards."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest

from agentenv.envs import EnvSpec
from agentenv.envs.adapters import ToolMethods, tool_env
from agentenv.testing import tool_call
from scenes import play


class Base:
    """Gives a tool and a reward to a class that is played."""

    def inherited(self, x: int) -> float:
        """Halve.

        Args:
            x: A number.
        """
        return x / 2


class Shop(Base):
    """Has members of every kind, and tools that return values of every kind."""

    limit = 3
    shout = str.upper

    def __init__(self) -> None:
        self.score = 0.0
        self.attribute = print

    @property
    def size(self) -> int:
        raise AssertionError("a property must not be read")

    @staticmethod
    def static(x: int) -> int:
        """Return it.

        Args:
            x: A number.
        """
        return x

    @classmethod
    def made(cls) -> str:
        """Make."""
        return "made"

    def reset(self, **columns: Any) -> Any:
        self.score = float(columns["start"])
        return columns["first"]

    def add(self, x: int, why: str = "") -> Any:
        """Add.

        Args:
            x: A number.
            why: A reason.
        """
        self.score += x
        return {"score": self.score, "why": why or None}

    def truth(self) -> bool:
        """Tell the truth."""
        return True

    def nothing(self) -> None:
        """Do nothing."""

    def step(self) -> str:
        """Step."""
        return "a step"

    def is_done(self) -> bool:
        """Ask."""
        return False

    def close(self) -> str:
        """Close."""
        return "closed"

    def fails(self) -> str:
        """Fail."""
        raise KeyError("no such thing")

    async def later(self, names: list[str]) -> str:
        """Wait.

        Args:
            names: Names.
        """
        return ",".join(names)

    def _hidden(self) -> str:
        return "hidden"

    def get_reward(self) -> float | None:
        return self.score if self.score > 0 else None


SEEN: list[dict[str, Any]] = []


def by_answer(answer, completions, **columns):
    """Score the column `answer`; keep what was passed."""
    SEEN.append({**columns, "answer": answer, "completions": copy.deepcopy(completions)})
    return [
        None if gold == "none" else float(gold in said[-1]["content"])
        for gold, said in zip(answer, completions, strict=True)
    ]


async def by_calls(completions, **columns):
    """Count arguments that are objects, and results that are errors."""
    calls = [call for said in completions[0] for call in said.get("tool_calls") or ()]
    errors = [said for said in completions[0] if said["role"] == "tool" and "error" in said["content"]]
    return [sum(isinstance(call["function"]["arguments"], dict) for call in calls) - 0.25 * len(errors)]


EVERY_TOOL = [
    tool_call("add", x=2, why="so"),
    tool_call("truth") + tool_call("nothing"),
    tool_call("inherited", x=3) + tool_call("static", x=4),
    tool_call("later", names=["a", "b"]) + tool_call("later", names=[]),
    tool_call("fails") + tool_call("step") + tool_call("is_done") + tool_call("close"),
    "The answer is gold.",
]
CASES = [
    (EVERY_TOOL, {"start": 1, "first": " Begin.", "answer": "gold"}),
    (["gold"], {"start": 0, "first": None, "answer": "none"}),
    (["silver"], {"start": 0, "first": "", "answer": "gold"}),
    ([tool_call("add", x=-1), "gold"], {"start": 0, "first": "x", "answer": "gold"}),
]
ROWS = [
    {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"Go {n}."}], **row}
    for n, (_, row) in enumerate(CASES)
]


def chat_template() -> str:
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()


def in_trl(trl_trainer, monkeypatch, script, row) -> tuple[list[str], dict[str, Any], float]:
    """Return the tools, what the first reward function got, and the reward, by TRL's own trainer."""
    import torch

    trainer = trl_trainer(
        [row],
        chat_template=chat_template(),
        settings={"per_device_train_batch_size": 4, "max_completion_length": 2000},
        reward=[by_answer, by_calls],
        environment_factory=Shop,
    )
    encode = trainer.processing_class.encode
    turns = iter(script)

    def speak(prompt_ids, *args, **kwargs):
        ids = encode(next(turns) + "<|im_end|>", add_special_tokens=False)
        return [list(ids)], [[-0.5] * len(ids)]

    monkeypatch.setattr(trainer, "_generate_single_turn", speak)
    scored: list[float] = []
    score = trainer._calculate_rewards

    def keep(*args):
        rewards = score(*args)
        weighted = rewards * trainer.reward_weights
        everything_missing = torch.isnan(rewards).all(dim=1)
        scored.append(float("nan") if everything_missing[0] else weighted.nansum(dim=1)[0].item())
        raise StopIteration  # the rest of the step needs a group

    monkeypatch.setattr(trainer, "_calculate_rewards", keep)
    trainer.model.config.max_position_embeddings = 10_000
    with pytest.raises((StopIteration, RuntimeError)):
        trainer._generate_and_score_completions([copy.deepcopy(row)])
    return sorted(tool.__name__ for tool in trainer._env_tools[None]), SEEN.pop(), scored[0]


def in_ours(script, row) -> tuple[list[str], dict[str, Any], float]:
    spec = EnvSpec.of("trl/Shop-v0", tool_env(Shop, [by_answer, by_calls]), tasks=[row])
    trajectory = asyncio.run(play(spec.make(), script, spec.task_set()[0], env_id=spec.id))
    assert trajectory.error is None, trajectory.error
    names = sorted(schema["function"]["name"] for schema in ToolMethods(Shop()).tool_schemas)
    reward = float("nan") if trajectory.reward is None else trajectory.reward
    return names, SEEN.pop(), reward


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", range(len(CASES)))
def test_trls_trainer_and_ours_read_a_class_alike(trl_trainer, monkeypatch, case):
    script, row = CASES[case][0], ROWS[case]

    their_tools, theirs, their_reward = in_trl(trl_trainer, monkeypatch, script, row)
    our_tools, ours, our_reward = in_ours(script, row)

    assert our_tools == their_tools
    assert our_reward == pytest.approx(their_reward, nan_ok=True)
    assert ours.keys() == theirs.keys()
    for name in ours.keys() - {"completion_ids", "environments", "trainer_state", "log_extra", "log_metric"}:
        assert ours[name] == theirs[name], name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trl_refuses_a_class_without_a_reward_as_we_do(trl_trainer):
    class Unscored:
        def reset(self, **columns: Any) -> str:
            return "go"

    with pytest.raises(ValueError, match="No reward source"):
        trl_trainer(
            ROWS[:1],
            chat_template=chat_template(),
            settings={"per_device_train_batch_size": 4},
            reward=[],
            environment_factory=Unscored,
        )
    with pytest.raises(ValueError, match="has no reward"):
        EnvSpec.of("trl/Unscored-v0", Unscored).make()
