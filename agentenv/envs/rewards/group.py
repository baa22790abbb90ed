"""Scores that need more than one episode's end: of whole groups, and of episodes already stored."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, cast

from agentenv.core.episode_env import Outcome
from agentenv.core.errors import UsageError
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.envs.rewards.reward import Reward, RewardFunction, RewardLike, as_reward, call_by_name, combine

__all__ = ["GroupReward", "rescore", "score_group"]


@dataclass(frozen=True, slots=True)
class GroupReward:
    """A reward that compares the episodes of one task.

    The function names what it needs: `trajectories`, `answers`, `rewards` (each episode's reward so
    far), `task` and the task's fields. It returns one number or None for each trajectory, in order.
    Episodes that failed are not among them.

    Raises:
        UsageError: The weight is not finite.
    """

    function: RewardFunction
    weight: float = 1.0
    name: str = ""
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        # The same rules hold as for a reward of one episode.
        Reward(self.function, self.weight, self.name, self.timeout_s)

    @property
    def label(self) -> str:
        """The part's name."""
        return Reward(self.function, name=self.name).label


async def score_group(group: TrajectoryGroup, rewards: Sequence[GroupReward]) -> TrajectoryGroup:
    """Return the group with what its rewards gave added to each episode's last turn.

    A None leaves the episode without a reward: it cannot be scored.

    Raises:
        UsageError: A reward asks for something unknown, or does not give one number each.
    """
    members = list(group.trajectories)
    places = [place for place, one in enumerate(members) if not one.stop_reason.failed]
    for reward in rewards:
        scored = [members[place] for place in places]
        if not scored:
            break
        values = await _values(reward, scored)
        for place, value in zip(places, values, strict=True):
            members[place] = _with_part(members[place], reward.label, reward.weight, value)
    return TrajectoryGroup(tuple(members))


async def rescore(trajectory: Trajectory, rewards: Sequence[RewardLike]) -> Trajectory:
    """Score a stored episode again: these rewards take the place of what it had.

    Rewards see `answer`, `messages`, `task`, `stop_reason`, `seed`, `trajectory` and the task's
    fields. The new reward stands in the last turn; the other turns have none.

    Raises:
        UsageError: A reward asks for what a stored episode does not have, such as `env`.
    """
    if trajectory.stop_reason.failed:
        return trajectory
    task = cast("Mapping[str, object]", trajectory.task)
    offered: dict[str, object] = {
        "answer": trajectory.answer,
        "messages": list(trajectory.messages),
        "task": dict(task),
        "stop_reason": trajectory.stop_reason.value,
        "seed": trajectory.seed,
        "trajectory": trajectory,
    }
    made = [as_reward(one) for one in rewards]
    parts = [(reward, await reward.score(offered, task)) for reward in made]
    outcome = combine(Outcome(0.0), parts)
    turns = tuple(replace(turn, reward=0.0) for turn in trajectory.turns)
    bare = replace(trajectory, turns=turns, reward=0.0, rewards=dict(outcome.rewards))
    return _with_reward(bare, outcome.reward)


async def _values(reward: GroupReward, members: Sequence[Trajectory]) -> list[float | None]:
    task = cast("Mapping[str, object]", members[0].task)
    offered: dict[str, object] = {
        "trajectories": list(members),
        "answers": [one.answer for one in members],
        "rewards": [one.reward for one in members],
        "task": dict(task),
    }
    async with asyncio.timeout(reward.timeout_s):
        given: Any = await call_by_name(reward.function, offered, task)
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence) or len(given) != len(members):
        raise UsageError(
            f"group reward {reward.label!r} gave {given!r:.200}",
            remedy=f"it gives a list of {len(members)}, one number or None for each trajectory",
        )
    values: list[float | None] = []
    for value in cast("Sequence[Any]", given):
        if value is not None and not isfinite(float(value)):
            raise UsageError(
                f"group reward {reward.label!r} gave {value!r}", remedy="a reward is finite, or None"
            )
        values.append(None if value is None else float(value))
    return values


def _with_part(one: Trajectory, name: str, weight: float, value: float | None) -> Trajectory:
    named = replace(one, rewards={**one.rewards, name: value})
    return _with_reward(named, None if value is None else weight * value)


def _with_reward(one: Trajectory, value: float | None) -> Trajectory:
    """Add a value to the last turn's reward, so that turn rewards still sum to the reward."""
    if value is None or one.reward is None:
        return replace(one, reward=None)
    if not one.turns:
        return replace(one, reward=one.reward + value)
    last = replace(one.turns[-1], reward=one.turns[-1].reward + value)
    return replace(one, turns=(*one.turns[:-1], last), reward=one.reward + value)
