"""The place in the tasks: reaching it makes no other task, and tasks never run out."""

from __future__ import annotations

from itertools import count

import pytest

from agentenv.envs import EnvSpec, TaskSet, ToolEnv
from agentenv.training.loop import Mixture


class Still(ToolEnv):
    def start(self, n: int) -> str:
        return f"{n}"

    def reward(self) -> float:
        return 0.0


def mixture_of(tasks) -> Mixture:
    return Mixture(EnvSpec.of("test/Still-v0", Still, tasks=tasks))


def dealt(mixture: Mixture, cursor: int, number: int = 3):
    tasks, after = mixture.deal(
        number, seed=0, round_index=1, cursors={"test/Still-v0": cursor}, left_out=frozenset()
    )
    assert after == {"test/Still-v0": cursor + number}
    return [one.task.id for one in tasks]


def test_a_place_deep_in_an_endless_set_is_reached_without_the_tasks_before_it():
    made: list[int] = []

    def by_seed(seed: int):
        made.append(seed)
        return {"n": seed}

    mixture = mixture_of(by_seed)
    from_the_start = dealt(mixture, 0, number=12)
    made.clear()

    assert dealt(mixture, 9) == from_the_start[9:]
    assert len(made) == 3
    assert len(dealt(mixture, 10**9)) == 3
    assert len(made) == 6


@pytest.mark.parametrize("cursor", [0, 9_999, 10_000, 34_567])
def test_a_generator_without_end_never_runs_out_of_tasks(cursor):
    mixture = mixture_of(lambda: ({"n": n} for n in count()))

    assert len(set(dealt(mixture, cursor))) == 3


@pytest.mark.parametrize(
    "source", [[{"n": n} for n in range(7)], lambda: ({"n": n} for n in count()), lambda seed: {"n": seed}]
)
def test_a_shuffle_may_begin_anywhere(source):
    tasks = TaskSet.of(source)
    whole = [task.id for task, _ in zip(tasks.shuffle(3), range(7), strict=False)]

    assert [task.id for task, _ in zip(tasks.shuffle(3, start=4), range(3), strict=False)] == whole[4:]
    assert tasks.num_shuffled in (7, 10_000, None)
