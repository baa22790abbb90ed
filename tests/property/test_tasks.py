"""Invariants of task sets."""

from hypothesis import given
from hypothesis import strategies as st

from agentenv.envs import TaskSet

values = st.one_of(st.integers(), st.text(max_size=5), st.booleans(), st.none(), st.floats())
rows = st.lists(st.dictionaries(st.text(max_size=4).filter(lambda name: name != "id"), values), max_size=12)


@given(rows)
def test_ids_are_unique_and_the_same_each_time(source):
    ids = [task.id for task in TaskSet.of(source)]

    assert len(set(ids)) == len(ids) == len(source)
    assert ids == [task.id for task in TaskSet.of(source)]


@given(rows, st.integers())
def test_shuffling_keeps_every_task_and_its_id(source, seed):
    tasks = TaskSet.of(source)
    shuffled = list(tasks.shuffle(seed))

    assert sorted(task.id for task in shuffled) == sorted(task.id for task in tasks)
    assert [task.id for task in shuffled] == [task.id for task in tasks.shuffle(seed)]


@given(rows.filter(bool), st.integers(min_value=0))
def test_sampling_draws_a_member_and_follows_from_the_seed(source, seed):
    tasks = TaskSet.of(source)

    assert tasks.sample(seed) == TaskSet.of(source).sample(seed)
    assert tasks.sample(seed).id in {task.id for task in tasks}
