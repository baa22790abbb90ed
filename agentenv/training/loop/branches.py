"""Branches inside the groups of a training: continuations of some members from one of their turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.envs.spec import EnvSpec
from agentenv.runner.plan import branches_of
from agentenv.runner.runner import Runner
from agentenv.training.config import GRPOConfig

__all__ = ["with_branches"]


async def with_branches(
    runner: Runner,
    spec: EnvSpec,
    groups: Sequence[TrajectoryGroup],
    config: GRPOConfig,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> list[TrajectoryGroup]:
    """Return the groups with the branches of their members, which are further members of the same group.

    The turns before `branch_turn` are shared: the environment plays them again, and only the member that
    sampled them trains their tokens (`Trajectory.branch_of`).

    Args:
        runner: plays the branches.
        spec: the environment of the groups.
        groups: the finished groups.
        config: `branches`, `branch_turn` and `branch_members`; nothing is played without `branches`.
        on_trajectory: called with each branch as it finishes.
    """
    if not config.branches:
        return list(groups)
    roots = [(group, member) for group in groups for member in _roots(group, config)]
    records = [member for _, member in roots]
    places: dict[str, tuple[str, int]] = {}
    grown = {group.group_id: list(group) for group in groups}
    for (group, _), job in zip(roots, branches_of(records, config.branch_turn, 0), strict=True):
        taken = sum(owner == group.group_id for owner, _ in places.values())
        first = 1 + max(member.member for member in group) + taken * config.branches
        places[job.group_id] = group.group_id, first

    def keep(branch: Trajectory) -> None:
        group_id, first = places[branch.group_id]
        placed = replace(branch, group_id=group_id, member=first + branch.member)
        grown[group_id].append(placed)
        if on_trajectory is not None:
            on_trajectory(placed)

    played = runner.run_branches(
        spec, records, config.branches, from_turn=config.branch_turn, on_trajectory=keep
    )
    async with aclosing(played):
        async for _ in played:
            pass
    members = [sorted(each, key=lambda member: member.member) for each in grown.values()]
    return [TrajectoryGroup(tuple(each)) for each in members]


def _roots(group: TrajectoryGroup, config: GRPOConfig) -> list[Trajectory]:
    """Return the members to branch: the first ones that can be trained and have a turn to branch at."""
    long = [member for member in group.usable if len(member.turns) > config.branch_turn]
    return long[: config.branch_members]
