"""The driver spreads the episodes of all workers evenly over the engine's servers."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from agentenv.workers.servers import ServerShares, num_servers_of


@pytest.mark.parametrize(
    ("model", "number"),
    [("http://a:8000/v1", 1), ("http://a:1/v1, https://b:2/v1,", 2), ("openai:gpt", 0), ("random", 0)],
)
def test_the_engine_string_tells_the_number_of_servers(model: str, number: int):
    assert num_servers_of(model) == number


def test_the_server_with_the_fewest_episodes_is_lent():
    shares = ServerShares(3)
    with ExitStack() as episodes:
        assert [episodes.enter_context(shares.lend()) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
        assert shares.episodes == [3, 2, 2]

    assert shares.episodes == [0, 0, 0]


def test_episodes_one_after_another_go_round():
    shares, lent = ServerShares(2), []
    for _ in range(4):
        with shares.lend() as server:
            lent.append(server)

    assert lent == [0, 1, 0, 1]


@pytest.mark.parametrize("number", [0, 1])
def test_without_a_choice_none_is_made(number: int):
    with ServerShares(number).lend() as server:
        assert server is None
