"""Mixtures of environments: each entry plays its own tasks, from its own place."""

from __future__ import annotations

import pytest

from agentenv.core import UsageError
from agentenv.core.loops import run_blocking
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.training.loop import Mixture
from helpers.prompts import trainer_of


class Still(ToolEnv):
    def start(self, n: int) -> str:
        return f"{n}"

    def reward(self) -> float:
        return 0.0


def spec(name: str, first: int = 0) -> EnvSpec:
    rows = {"train": [{"n": first + n} for n in range(4)], "test": [{"n": first + 9}]}
    return EnvSpec.of(f"test/{name}-v0", Still, tasks=rows)


def numbers(tasks) -> list[int]:
    return [task.data["n"] for task in tasks]


def dealt(mixture: Mixture, count: int, cursors, round_index: int = 1):
    tasks, after = mixture.deal(count, seed=0, round_index=round_index, cursors=cursors, left_out=frozenset())
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


def test_a_prompt_too_long_in_one_entry_is_played_in_the_other(tmp_path):
    trainer = repeated(tmp_path, max_prompt_length=400, max_steps=20)

    counts = run_blocking(trainer.rollouts.leave_out_long_prompts({}))

    assert counts["tasks/test/Repeated-v0/too_long"] == 0
    assert counts["tasks/test/Repeated-v0 (2)/too_long"] == 1
    assert {name for name, _ in trainer.rollouts.left_out} == {"test/Repeated-v0 (2)"}
