"""Spaces for text and chat messages."""

import json
import pickle

import pytest

from agentenv.envs import Action, Chat, Env, Text

USER = {"role": "user", "content": "naïve\nhello 漢"}
ALL = [Text(), Text(5), Chat(), Action()]


MEMBERS = {
    repr(Text()): ["naïve\nhello 漢 \x00"],
    repr(Text(5)): ["12345"],
    repr(Chat()): [[], [USER], (USER, {"role": "tool", "content": None}), [{"role": "user", "content": []}]],
    repr(Action()): ["text", {"role": "assistant", "content": None}],
}
OTHERS = {
    repr(Text()): [3],
    repr(Text(5)): ["123456"],
    repr(Chat()): ["text", USER, [{"role": "me", "content": ""}], [{"content": ""}], [3], None],
    repr(Action()): [USER, 3],
}


@pytest.mark.parametrize("space", ALL, ids=repr)
def test_samples_are_members_and_follow_from_the_seed(space):
    space.seed(3)
    drawn = [space.sample() for _ in range(50)]
    space.seed(3)

    assert all(one in space for one in [*drawn, *MEMBERS[repr(space)]])
    assert not any(one in space for one in OTHERS[repr(space)])
    assert drawn == [space.sample() for _ in range(50)]
    assert len({json.dumps(one) for one in drawn}) > 10


@pytest.mark.parametrize("space", ALL, ids=repr)
def test_they_survive_json_pickle_and_comparison(space):
    drawn = [space.sample() for _ in range(5)]

    assert space.from_jsonable(json.loads(json.dumps(space.to_jsonable(drawn)))) == drawn
    assert pickle.loads(pickle.dumps(space)) == space
    assert eval(repr(space)) == space
    assert not space.is_np_flattenable
    assert Text() != Text(5)


def test_instances_of_an_environment_draw_from_generators_of_their_own():
    first, second = Env(), Env()
    first.action_space.seed(1)
    second.action_space.seed(1)

    assert first.action_space.sample() == second.action_space.sample()
    assert first.action_space.np_random is not second.action_space.np_random
