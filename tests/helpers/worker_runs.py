"""What tests of workers share: the file of an environment, and what must be equal wherever it is played."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentenv.core import RunLimits, Trajectory
from agentenv.engine import Sampling
from agentenv.envs import EnvSpec
from agentenv.runner import RunnerOptions
from agentenv.runs.store.codec import encode_trajectory
from agentenv.workers import Recipe

DEADLY = str(Path(__file__).with_name("deadly.py"))
"""File of the environment whose tasks kill processes."""


def recipe_of(specs: list[EnvSpec], model: str = "random", **given: Any) -> Recipe:
    """Return what a worker needs to play these environments, for three turns at most unless told otherwise."""
    values = {"runner": RunnerOptions(), "limits": RunLimits(max_turns=3), "sampling": Sampling(), **given}
    return Recipe.of(specs, model, **values)


def truth(episodes: Iterable[Trajectory]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the episodes by group and member as plain values, without measured times."""
    return {(episode.group_id, episode.member): _plain(episode) for episode in episodes}


def _plain(episode: Trajectory) -> dict[str, Any]:
    data = encode_trajectory(episode)
    data.pop("timings", None)
    for turn in data["turns"]:
        turn.pop("timings", None)
        for result in turn.get("tool_results", []):
            result.pop("duration_s", None)
    return json.loads(json.dumps(data))
