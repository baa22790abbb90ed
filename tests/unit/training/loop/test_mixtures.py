"""Mixtures of environments: each entry plays its own tasks, from its own place."""

from __future__ import annotations

from itertools import count

import pytest

import agentenv as ae
from agentenv.core import UsageError
from agentenv.envs import EnvSpec, TaskSet, ToolEnv
from agentenv.runner import RunnerOptions
from agentenv.training import GRPOTrainer
from agentenv.training.loop import Mixture
from helpers.prompts import Long, trainer_of
from scenes import Lengths, spec_of


def spec(name: str, first: int = 0) -> EnvSpec:
    rows = {"train": [{"n": first + n} for n in range(4)], "test": [{"n": first + 9}]}
    return EnvSpec.of(f"test/{name}-v0", Lengths, tasks=rows)


def numbers(tasks) -> list[int]:
    return [task.data["n"] for task in tasks]


def dealt(mixture: Mixture, number: int, cursors, round_index: int = 1):
    tasks, after = mixture.deal(number, seed=0, round_index=round_index, cursors=cursors)
    return [(one.owner, one.task.data["n"]) for one in tasks], after


def test_an_environment_without_given_tasks_keeps_its_own():
    one, other = spec("One"), spec("Other", first=100)
    mixture = Mixture([one, other], tasks={one.id: [{"n": 5}]}, eval_tasks={one.id: [{"n": 6}]})

    assert [numbers(mixture.tasks_of(entry)) for entry in (one, other)] == [[5], [100, 101, 102, 103]]
    assert [numbers(mixture.held_out(entry)) for entry in (one, other)] == [[6], [109]]


def test_tasks_for_an_environment_that_is_not_played_are_refused():
    one = spec("One")
    with pytest.raises(UsageError, match="tasks are given for 'test/Onne-v0', which is not played"):
        Mixture(one, tasks={one.id: [{"n": 1}], "test/Onne-v0": [{"n": 2}]})


def test_splits_are_no_environments():
    one = spec("One")
    mixture = Mixture(one, tasks={"train": [{"n": 1}], "test": [{"n": 2}]})
    assert numbers(mixture.tasks_of(one)) == [1]


def test_a_generator_of_tasks_lasts_for_the_whole_run():
    mixture = Mixture(spec("One"), tasks=({"n": n} for n in range(3)))
    first, after = dealt(mixture, 3, {})
    second, _ = dealt(mixture, 3, after)
    assert sorted(first) == sorted(second) == [(0, 0), (0, 1), (0, 2)]


def test_two_entries_of_one_environment_have_a_place_each():
    one = spec("One")
    mixture = Mixture([one, one])
    seen: dict[int, list[int]] = {0: [], 1: []}
    cursors: dict[str, int] = {}
    for round_index in range(40):
        tasks, cursors = dealt(mixture, 3, cursors, round_index)
        for owner, number in tasks:
            seen[owner].append(number)

    assert cursors == {"test/One-v0": len(seen[0]), "test/One-v0 (2)": len(seen[1])}
    for played in seen.values():  # a task repeats only after all others
        rounds = [played[start : start + 4] for start in range(0, len(played) - 3, 4)]
        assert all(sorted(one) == [0, 1, 2, 3] for one in rounds)


def ids_from(mixture: Mixture, cursor: int, count: int = 3) -> list[str]:
    """The tasks that follow a place, after a start there."""
    cursors = {"test/Lengths-v0": cursor}
    dealt, after = mixture.deal(count, seed=0, round_index=1, cursors=cursors)
    assert after == {"test/Lengths-v0": cursor + count}
    return [one.task.id for one in dealt]


def test_a_place_deep_in_an_endless_set_is_reached_without_the_tasks_before_it():
    made: list[int] = []

    def by_seed(seed: int):
        made.append(seed)
        return {"n": seed}

    mixture = Mixture(spec_of(Lengths, by_seed))
    from_the_start = ids_from(mixture, 0, count=12)
    made.clear()

    assert ids_from(mixture, 9) == from_the_start[9:]
    assert len(made) == 3
    assert len(ids_from(mixture, 10**9)) == 3
    assert len(made) == 6


@pytest.mark.parametrize("cursor", [0, 9_999, 10_000, 34_567])
def test_a_generator_without_end_never_runs_out_of_tasks(cursor):
    mixture = Mixture(spec_of(Lengths, lambda: ({"n": n} for n in count())))

    assert len(set(ids_from(mixture, cursor))) == 3


@pytest.mark.parametrize(
    "source", [[{"n": n} for n in range(7)], lambda: ({"n": n} for n in count()), lambda seed: {"n": seed}]
)
def test_a_shuffle_may_begin_anywhere(source):
    tasks = TaskSet.of(source)
    whole = [task.id for task, _ in zip(tasks.shuffle(3), range(7), strict=False)]

    assert [task.id for task, _ in zip(tasks.shuffle(3, start=4), range(3), strict=False)] == whole[4:]
    assert tasks.num_shuffled in (7, 10_000, None)


class Repeated(ToolEnv):
    def __init__(self, size: int = 1) -> None:
        self.size = size

    def start(self, n: int) -> str:
        return "x" * self.size * n

    def reward(self) -> float:
        return float(self.size)


def repeated(tmp_path, **options):
    rows = {"train": [{"n": n} for n in range(1, 5)], "test": [{"n": 2}]}
    entry = EnvSpec.of("test/Repeated-v0", Repeated, tasks=rows)
    return trainer_of(tmp_path, envs=[entry, entry.with_kwargs({"size": 100})], **options)


def test_two_entries_of_one_environment_are_evaluated_each(tmp_path):
    groups: list[str] = []
    trainer = repeated(tmp_path, on_held_out=lambda one: groups.append(one.group_id))

    scores = trainer.evaluate()

    assert scores["eval/test/Repeated-v0/reward"] == 1.0
    assert scores["eval/test/Repeated-v0 (2)/reward"] == 100.0
    assert len(set(groups)) == 2


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


def test_a_training_condenses_the_prompts_that_do_not_fit_with_its_own_policy(tmp_path):
    limits = ae.RunLimits(max_turns=1, max_tokens_per_turn=4, max_context_tokens=900)
    sizes = {"max_chars": 400, "min_chars": 50, "keep_ends": 0, "sampling": {"max_tokens": 8}}
    runner = RunnerOptions(condenser={"name": "agentenv_extras:SummarisePassages", **sizes})
    played = []
    trainer = trainer_of(
        tmp_path,
        tasks=[{"size": 4}, {"size": 1200}],
        limits=limits,
        runner=runner,
        on_trajectory=played.append,
    )

    trainer.train()

    shortened = [episode for episode in played if episode.task["size"] == 1200]
    assert shortened
    assert all(episode.rewrites and episode.trainable and not episode.error for episode in shortened)
    assert all(len(episode.sequences[0]) < 900 for episode in played)
