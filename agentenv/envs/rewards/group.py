"""Score whole groups of episodes, and score stored episodes again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, cast

from agentenv.core.errors import InfrastructureError, UsageError
from agentenv.core.faults import class_of, message_of, must_pass, traceback_of
from agentenv.core.trajectory import EpisodeError, StopReason, Trajectory, TrajectoryGroup
from agentenv.envs.rewards.reward import Reward, RewardFunction, RewardLike, as_reward, call_by_name, combine

__all__ = ["GroupReward", "rescore", "score_group"]


@dataclass(frozen=True, slots=True)
class GroupReward:
    """A reward that compares the episodes of one task.

    The function's arguments are filled by name: `trajectories`, `answers`, `rewards` (each episode's reward
    so far), `task` and the task's fields. It returns one number or None for each trajectory, in order.
    Failed episodes are not passed to it.

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
        """Name of the reward's part."""
        return Reward(self.function, name=self.name).label


async def score_group(group: TrajectoryGroup, rewards: Sequence[GroupReward]) -> TrajectoryGroup:
    """Return the group with the values of the group rewards added to each episode's last turn.

    If a reward returns None for an episode, the episode cannot be scored and has no reward. If a reward's
    function raises, the episodes fail at the boundary `reward`; they are never scored 0.

    Raises:
        UsageError: A reward has an unknown parameter, or does not return one number for each episode.
    """
    members = list(group.trajectories)
    indices = [index for index, trajectory in enumerate(members) if not trajectory.stop_reason.failed]
    for reward in rewards:
        scored = [members[index] for index in indices]
        if not scored:
            break
        try:
            values = await _values(reward, scored)
        except UsageError:
            raise
        except BaseException as error:
            if must_pass(error):
                raise
            for index in indices:
                members[index] = _failed(members[index], error)
            break
        for index, value in zip(indices, values, strict=True):
            members[index] = _with_part(members[index], reward.label, reward.weight, value)
    return TrajectoryGroup(tuple(members))


async def rescore(trajectory: Trajectory, rewards: Sequence[RewardLike]) -> Trajectory:
    """Score a stored episode again; these rewards replace its old ones.

    The arguments of a reward may be `answer`, `messages`, `task`, `stop_reason`, `seed`, `trajectory` and
    the task's fields. The last turn gets the new reward; the other turns get 0.

    Raises:
        UsageError: A reward has a parameter that a stored episode cannot fill, such as `env`.
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
    parts = [(reward, await reward.score(offered, task)) for reward in map(as_reward, rewards)]
    outcome = combine(None, parts)
    turns = tuple(replace(turn, reward=0.0) for turn in trajectory.turns)
    bare = replace(trajectory, turns=turns, reward=0.0, rewards=dict(outcome.rewards), digest="")
    return _with_reward(bare, outcome.reward)


async def _values(reward: GroupReward, members: Sequence[Trajectory]) -> list[float | None]:
    task = cast("Mapping[str, object]", members[0].task)
    offered: dict[str, object] = {
        "trajectories": list(members),
        "answers": [trajectory.answer for trajectory in members],
        "rewards": [trajectory.reward for trajectory in members],
        "task": dict(task),
    }
    async with asyncio.timeout(reward.timeout_s):
        scores: Any = await call_by_name(reward.function, offered, task)
    if isinstance(scores, (str, Mapping)) or not isinstance(scores, Sequence) or len(scores) != len(members):
        raise UsageError(
            f"group reward {reward.label!r} returned {scores!r:.200}",
            remedy=f"return a list of {len(members)}, with a number or None for each trajectory",
        )
    values: list[float | None] = []
    for value in cast("Sequence[Any]", scores):
        if value is not None and not isfinite(float(value)):
            raise UsageError(
                f"group reward {reward.label!r} returned {value!r}",
                remedy="a reward must be a finite number or None",
            )
        values.append(None if value is None else float(value))
    return values


def _failed(trajectory: Trajectory, error: BaseException) -> Trajectory:
    """Return an episode whose group reward raised."""
    infrastructure = issubclass(type(error), InfrastructureError)
    what = EpisodeError("reward", class_of(error), message_of(error), traceback_of(error))
    return replace(
        trajectory,
        stop_reason=StopReason.ABORTED if infrastructure else StopReason.ERROR,
        reward=None,
        error=what,
        untrainable_reason=f"failed at reward: {what.type}: {what.message}",
    )


def _with_part(trajectory: Trajectory, name: str, weight: float, value: float | None) -> Trajectory:
    named = replace(trajectory, rewards={**trajectory.rewards, name: value})
    return _with_reward(named, None if value is None else weight * value)


def _with_reward(trajectory: Trajectory, value: float | None) -> Trajectory:
    """Add a value to the rewards of the episode and of its last turn, so that turn rewards still sum up."""
    if value is None or trajectory.reward is None:
        return replace(trajectory, reward=None)
    reward, turns = trajectory.reward + value, trajectory.turns
    if not turns:
        return replace(trajectory, reward=reward)
    last = replace(turns[-1], reward=turns[-1].reward + value)
    return replace(trajectory, turns=(*turns[:-1], last), reward=reward)
