"""Every token and log-probability of a completion is checked, wherever the wrong one stands."""

from __future__ import annotations

import pytest

from agentenv.core import EngineError
from agentenv.engine.exact import exact_completion, faulty_end, faulty_ids

STOP = 2
LENGTH = 5


def completion(tokens, logprobs=None, reason="stop"):
    return exact_completion(
        "engine",
        tokens,
        [-0.5] * len(tokens) if logprobs is None else logprobs,
        reason,
        stop=frozenset([STOP]),
        max_tokens=LENGTH,
        ranges=(),
        vocab_size=100,
    )


@pytest.mark.parametrize("place", range(LENGTH))
@pytest.mark.parametrize(
    ("token", "said"),
    [
        (True, "token {place} as True, a bool and not an integer"),
        ("7", "token {place} as '7', a str and not an integer"),
        (7.0, "token {place} as 7.0, a float and not an integer"),
        (None, "token {place} as None, a NoneType and not an integer"),
        (-1, "token id -1, which is outside the vocabulary of 100"),
        (100, "token id 100, which is outside the vocabulary of 100"),
    ],
)
def test_a_wrong_token_is_found_at_any_place(token, said, place):
    tokens = [10, 20, 30, 40, STOP]
    tokens[place] = token

    assert faulty_ids(tokens, 100) == said.format(place=place)


def test_right_tokens_have_no_fault():
    assert faulty_ids([0, 99], 100) == faulty_ids([10**12], None) == faulty_ids([], 100) == ""


@pytest.mark.parametrize("place", range(LENGTH))
@pytest.mark.parametrize("logprob", [float("nan"), float("inf"), float("-inf"), -9999.0])
def test_a_wrong_logprob_is_found_at_any_place(logprob, place):
    logprobs = [-0.5] * LENGTH
    logprobs[place] = logprob

    with pytest.raises(EngineError, match="a log-probability that is not finite"):
        completion([10, 20, 30, 40, STOP], logprobs)


@pytest.mark.parametrize("place", range(LENGTH - 1))
def test_tokens_after_a_stop_token_are_found(place):
    tokens = [10, 20, 30, 40, STOP]
    tokens[place] = STOP

    wanted = f"{LENGTH - 1 - place} tokens after the stop token {STOP}"
    assert faulty_end(tokens, "stop", stop=(STOP,), max_tokens=LENGTH) == wanted


def test_a_right_completion_is_returned_as_it_was():
    found = completion([10, 20, STOP], [-0.5, 0.0, -8999.0])

    assert (found.token_ids, found.logprobs) == ((10, 20, STOP), (-0.5, 0.0, -8999.0))
