"""The sections of settings that every command which plays episodes accepts."""

from __future__ import annotations

from collections.abc import Mapping

from agentenv.core.limits import RunLimits
from agentenv.core.settings import Section
from agentenv.engine.interface import Sampling
from agentenv.runner.options import RunnerOptions
from agentenv.runs.eval_config import EvalConfig

__all__ = ["EVAL_SECTIONS", "PLAY_SECTIONS"]

PLAY_SECTIONS: Mapping[str, Section] = {
    "env": Section(),
    "runner": Section(RunnerOptions),
    "limits": Section(RunLimits),
    # The runner derives the seed of every completion, so a setting would have no effect. A grammar belongs to
    # one reply, for which the endpoint sets it.
    "sampling": Section(Sampling, without=frozenset({"seed", "grammar"})),
    "engine": Section(),
}
"""`env` has the keyword arguments of the environment, and `engine` has the options of the engine."""

EVAL_SECTIONS: Mapping[str, Section] = {
    **PLAY_SECTIONS,
    "eval": Section(EvalConfig, without=frozenset(PLAY_SECTIONS)),
}
"""`eval` has the fields of `EvalConfig` that are not sections themselves, such as `success_at`."""
