"""The sections of settings that every verb which plays episodes understands."""

from __future__ import annotations

from collections.abc import Mapping

from agentenv.core.limits import RunLimits
from agentenv.core.settings import Section
from agentenv.engine.base import Sampling
from agentenv.runner.options import RunnerOptions
from agentenv.runs.evaluate import EvalConfig

__all__ = ["EVAL_SECTIONS", "PLAY_SECTIONS"]

PLAY_SECTIONS: Mapping[str, Section] = {
    "env": Section(),
    "runner": Section(RunnerOptions),
    "limits": Section(RunLimits),
    # The runner derives the seed of every completion, so that no setting could have an effect.
    "sampling": Section(Sampling, without=frozenset({"seed"})),
    "engine": Section(),
}
"""`env` are the keyword arguments of the environment, `engine` the options of the engine."""

EVAL_SECTIONS: Mapping[str, Section] = {
    **PLAY_SECTIONS,
    "eval": Section(EvalConfig, without=frozenset(PLAY_SECTIONS)),
}
"""`eval` has what an evaluation is told besides the sections, such as `success_at`."""
