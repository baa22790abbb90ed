"""Supports: each sampled token is in its own, and what cannot be a support cannot be built."""

from __future__ import annotations

import pickle
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core import AlignmentError, SequenceBuilder, Supports, TokenSpan
from agentenv.core.supports import MOST_TOKENS, SupportsBuilder

supports = st.lists(st.sets(st.integers(0, 2**31 - 1), min_size=1, max_size=6), max_size=8)


@given(supports, st.integers(0, 9), st.integers(0, 9))
def test_what_was_put_in_comes_out_and_parts_are_parts(parts, start, end):
    kept = Supports.of(parts)

    lists = [sorted(part) for part in parts]
    assert kept.tolist() == lists
    assert len(kept) == len(parts)
    assert [kept[index] for index in range(len(kept))] == list(map(tuple, lists))
    assert kept.cut(start, end).tolist() == lists[start:end]
    assert Supports.joined([kept.cut(0, start), kept.cut(start, len(kept))]) == kept
    assert kept.highest == max((max(part) for part in parts), default=-1)
    assert pickle.loads(pickle.dumps(kept)) == kept
    assert len({kept, Supports.of(parts)}) == 1


@given(supports.filter(bool), st.data())
def test_a_sampled_token_is_in_its_support(parts, data):
    kept = Supports.of(parts)
    sampled = tuple(data.draw(st.sampled_from(sorted(part))) for part in parts)
    index = data.draw(st.integers(0, len(parts) - 1))
    wrong = data.draw(st.integers(0, 2**31 - 1).filter(lambda token: token not in parts[index]))

    span = TokenSpan("model", sampled, (-0.5,) * len(sampled), 0, 0, kept)

    assert span.supports == kept
    with pytest.raises(AlignmentError, match="not in its support"):
        TokenSpan(
            "model", (*sampled[:index], wrong, *sampled[index + 1 :]), (-0.5,) * len(sampled), 0, 0, kept
        )
    with pytest.raises(AlignmentError, match="supports"):
        TokenSpan("model", (*sampled, 1), (-0.5,) * (len(sampled) + 1), 0, 0, kept)
    with pytest.raises(AlignmentError, match="must not have supports"):
        TokenSpan("env", sampled, supports=kept)


@given(supports, st.integers(0, 8))
def test_a_completion_of_several_versions_and_a_cut_keep_each_tokens_support(parts, border):
    sampled = [min(part) for part in parts]
    border = min(border, len(parts))
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2, 3])

    builder.append_completion(
        sampled,
        [-0.5] * len(sampled),
        [
            (version, *ends)
            for version, ends in enumerate([(0, border), (border, len(sampled))])
            if ends[0] < ends[1]
        ],
        turn=0,
        supports=Supports.of(parts),
    )

    sequence = builder.freeze()
    whole = sequence.supports_of(3, len(sequence))
    assert whole is not None
    assert whole.tolist() == [sorted(part) for part in parts]
    cut = sequence.cut(3 + border).supports_of(3, 3 + border)
    assert cut is not None
    assert cut.tolist() == [sorted(part) for part in parts[:border]]
    assert sequence.supports_of(0, len(sequence)) is None  # the prompt was not sampled


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        ([1, 1], [2], "not ascending"),
        ([2, 1], [2], "not ascending"),
        ([-1, 1], [2], "not ascending from 0"),
        ([1, 2], [2, 0], "has 0 tokens"),
        ([1, 2], [1], "there are 2 ids"),
        ([1], [2], "there are 1 ids"),
        (range(MOST_TOKENS + 1), [MOST_TOKENS + 1], f"1 to {MOST_TOKENS}"),
    ],
)
def test_what_is_no_support_is_refused(ids, lengths, message):
    with pytest.raises(AlignmentError, match=message):
        Supports.flat(ids, lengths)


def test_a_builder_says_which_support_was_too_large_and_what_to_change():
    builder = SupportsBuilder()
    builder.append(array("i", [3, 4]))
    whole = builder.freeze()
    builder.append(5000)
    builder.append(array("i", [3]))

    assert whole is not None
    assert whole.tolist() == [[3, 4]]
    assert builder.freeze() is None
    assert "left 5000 tokens for token 1" in builder.reason
    assert "set top_k to at most 4096" in builder.reason
