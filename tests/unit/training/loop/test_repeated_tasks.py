"""A task that comes several times in one step is played with seeds of its own each time."""

from __future__ import annotations

from agentenv.envs import EnvSpec
from agentenv.training import GRPOTrainer
from helpers.prompts import Long, trainer_of


async def groups_of(trainer: GRPOTrainer, rank: int, size: int):
    """Return the groups that one of several processes plays in the first step."""
    trainer.world.rank, trainer.world.size = rank, size
    async with trainer.rollouts as rollouts:
        batch = rollouts.begin(0, {})
        await batch
    return batch.groups


async def test_a_task_that_two_processes_play_makes_two_groups_with_other_seeds(tmp_path):
    trainer = trainer_of(tmp_path, tasks=[{"size": 5}], groups_per_step=4)

    alone = await groups_of(trainer, 0, 1)
    first = await groups_of(trainer, 0, 2)
    second = await groups_of(trainer, 1, 2)

    split = sorted([*first, *second], key=lambda group: group.group_id)
    assert len({group.group_id for group in split}) == 4
    assert len({group.trajectories[0].seed for group in split}) == 4
    assert [group.group_id for group in split] == [group.group_id for group in alone]
    assert [group.trajectories[0].seed for group in split] == [group.trajectories[0].seed for group in alone]


async def test_two_entries_of_one_environment_make_groups_of_their_own(tmp_path):
    entry = EnvSpec.of("test/Long-v0", Long, tasks=[{"size": 5}])
    trainer = trainer_of(tmp_path, envs=[entry, entry], groups_per_step=4)

    played = await groups_of(trainer, 0, 1)

    assert len({group.group_id for group in played}) == 4
