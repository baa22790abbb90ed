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
        lent = [episodes.enter_context(shares.lend()) for _ in range(7)]
        assert sorted(lent[:3]) == sorted(lent[3:6]) == [0, 1, 2]
        assert sorted(shares.episodes) == [2, 2, 3]
        assert shares.episodes[lent[6] or 0] == 3

    assert shares.episodes == [0, 0, 0]


def test_episodes_one_after_another_go_round():
    shares, lent = ServerShares(2), []
    for _ in range(4):
        with shares.lend() as server:
            lent.append(server)

    assert lent in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_drivers_do_not_all_begin_with_the_same_server():
    first: set[int | None] = set()
    for _ in range(60):
        with ServerShares(2).lend() as server:
            first.add(server)

    assert first == {0, 1}


@pytest.mark.parametrize("number", [0, 1])
def test_without_a_choice_none_is_made(number: int):
    with ServerShares(number).lend() as server:
        assert server is None
