"""The experts of tokens travel with the tokens, and each token keeps those of the first request that saw it."""

from __future__ import annotations

import numpy as np
import pytest

from agentenv.core import AlignmentError, RoutedExperts, SequenceBuilder, TokenSequence


def experts(*values: int, kind: str = "uint8") -> RoutedExperts:
    """Return experts of 3 layers and 2 choices, each token with a number of its own."""
    ids = np.array(values, kind)[:, None, None] + np.arange(6, dtype=kind).reshape(3, 2)
    return RoutedExperts.of(ids.astype(kind))


def first(sequence: TokenSequence) -> list[int]:
    return sequence.routed_experts.array()[:, 0, 0].tolist()


@pytest.mark.parametrize(("kind", "width"), [("uint8", 1), ("uint16", 2)])
def test_ids_are_kept_in_one_or_two_bytes(kind, width):
    ids = np.arange(60).reshape(10, 3, 2).astype(kind)

    routed = RoutedExperts.of(ids)

    assert (len(routed), routed.width, len(routed.data)) == (10, width, 60 * width)
    assert routed.array().tolist() == ids.tolist()
    assert routed.part(2, 5).array().tolist() == ids[2:5].tolist()
    assert routed.part(0, 4).then([routed.part(4, 7), routed.part(7, 10)]) == routed


@pytest.mark.parametrize(
    "make",
    [
        lambda: RoutedExperts(b"12345", layers=3, choices=2),
        lambda: RoutedExperts(b"", layers=0, choices=2),
        lambda: RoutedExperts(b"123456", layers=3, choices=2, width=4),
        lambda: RoutedExperts.of(np.zeros((2, 3), "uint8")),
        lambda: RoutedExperts.of(np.zeros((2, 3, 2), "int32")),
        lambda: experts(1).then([RoutedExperts(b"1234", layers=2, choices=2)]),
    ],
)
def test_what_is_no_such_list_is_refused(make):
    with pytest.raises(AlignmentError):
        make()


def two_turns(second: RoutedExperts | None) -> TokenSequence:
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2, 3])
    builder.append_completion([4, 5], [-1.0, -1.0], [(0, 0, 2)], turn=0)
    builder.route(experts(10, 11, 12, 13))
    builder.append("env", [6], turn=0)
    builder.append_completion([7], [-1.0], [(0, 0, 1)], turn=1)
    builder.route(second)
    return builder.freeze()


def test_a_token_keeps_the_experts_of_the_first_request_that_saw_it():
    sequence = two_turns(experts(20, 21, 22, 23, 24, 25))

    # Token 4 is the last sampled one of the first turn, which only the second request saw as input.
    assert first(sequence) == [10, 11, 12, 13, 24, 25]
    assert first(sequence.cut(3)) == [10, 11, 12]


def test_an_engine_that_tells_experts_later_tells_those_of_all_tokens():
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2])
    builder.append("other", [3, 4])
    builder.append_completion([5], [-1.0], [(0, 0, 1)], turn=0)
    builder.route(experts(1, 2, 3, 4))

    assert first(builder.freeze()) == [1, 2, 3, 4]
    assert first(two_turns(None)) == [10, 11, 12, 13]


@pytest.mark.parametrize("count", [5, 7])
def test_experts_of_another_number_of_tokens_are_refused(count):
    with pytest.raises(AlignmentError, match=f"{count} tokens.* have 7"):
        two_turns(experts(*range(count)))


def test_a_sequence_without_experts_has_none():
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2])
    assert builder.freeze().routed_experts is None
    assert builder.freeze().cut(1).routed_experts is None
