"""Spaces for text and chat messages."""

import json
import pickle

import pytest

from agentenv.envs import Action, Chat, Env, Text

USER = {"role": "user", "content": "naïve\nhello 漢"}
ALL = [Text(), Text(5), Chat(), Action()]


@pytest.mark.parametrize("space", ALL, ids=repr)
def test_samples_are_members_and_follow_from_the_seed(space):
    space.seed(3)
    drawn = [space.sample() for _ in range(50)]
    space.seed(3)

    assert all(one in space for one in drawn)
    assert drawn == [space.sample() for _ in range(50)]
    assert len({json.dumps(one) for one in drawn}) > 10


@pytest.mark.parametrize("space", ALL, ids=repr)
def test_they_survive_json_pickle_and_comparison(space):
    drawn = [space.sample() for _ in range(5)]

    assert space.from_jsonable(json.loads(json.dumps(space.to_jsonable(drawn)))) == drawn
    assert pickle.loads(pickle.dumps(space)) == space
    assert eval(repr(space)) == space
    assert not space.is_np_flattenable


def test_any_text_is_text_and_numbers_are_not():
    assert "naïve\nhello 漢 \x00" in Text()
    assert "123456" not in Text(5)
    assert 3 not in Text()
    assert Text() != Text(5)


@pytest.mark.parametrize(
    "value", [[], [USER], (USER, {"role": "tool", "content": None}), [{"role": "user", "content": []}]]
)
def test_messages_are_members_of_chat(value):
    assert value in Chat()


@pytest.mark.parametrize(
    "value", ["text", USER, [{"role": "me", "content": ""}], [{"content": ""}], [3], None]
)
def test_what_is_no_list_of_messages_is_no_member_of_chat(value):
    assert value not in Chat()


def test_actions_are_text_or_what_an_assistant_says():
    assert "text" in Action()
    assert {"role": "assistant", "content": None} in Action()
    assert USER not in Action()
    assert 3 not in Action()


def test_instances_of_an_environment_draw_from_generators_of_their_own():
    first, second = Env(), Env()
    first.action_space.seed(1)
    second.action_space.seed(1)

    assert first.action_space.sample() == second.action_space.sample()
    assert first.action_space.np_random is not second.action_space.np_random
