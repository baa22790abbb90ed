"""Games of textarena: moves without brackets, numbers that Python does not read, messages that are no text."""

from __future__ import annotations

import pytest

from agentenv.envs import make
from agentenv_worlds.textarena.env import players_of
from helpers.worlds import world

pytestmark = pytest.mark.slow


def test_a_move_without_brackets_is_read():
    world("textarena:FrozenLake-v0")
    env = make("textarena:FrozenLake-v0")
    plain, bracketed = ([], [])
    for told, move in ((plain, "right"), (bracketed, "[right]")):
        env.reset(seed=1, options={"task": {"seed": 1}})
        told += [str(env.step(move)[0]) for _ in range(2)]

    assert plain == bracketed


def test_a_number_that_python_does_not_read_is_a_wrong_move_and_messages_that_are_no_text_are_shown():
    world("textarena:FrozenLake-v0")
    for game, moves in (
        ("FrozenLake-v0", ("9" * 1_000_000, f"[{'9' * 5_000}]")),
        ("Countdown-v0", ("[0 1 +]",)),
    ):
        assert players_of(game) == 1
        env = make(f"textarena:{game}")
        for text in moves:
            env.reset(seed=1, options={"task": {"seed": 1}})
            assert isinstance(env.step(text)[0], str)
