"""Spans and sequences: the aligned views cannot disagree, and a record cannot claim what it is not."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core import (
    AlignmentError,
    EpisodeError,
    SequenceBuilder,
    StopReason,
    TokenSequence,
    TokenSpan,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

ids = st.lists(st.integers(0, 300_000), max_size=8)
good_logprobs = st.floats(-50, 0, allow_nan=False)
bad_logprobs = st.one_of(
    st.just(float("nan")), st.just(float("inf")), st.just(float("-inf")), st.floats(0.002, 50), st.none()
)


@st.composite
def spans(draw):
    source = draw(st.sampled_from(["prompt", "model", "env", "other"]))
    token_ids = draw(ids)
    if source != "model":
        return TokenSpan(source, tuple(token_ids), turn=draw(st.integers(-1, 5)))
    logprobs = draw(st.lists(good_logprobs, min_size=len(token_ids), max_size=len(token_ids)))
    return TokenSpan(
        source, tuple(token_ids), tuple(logprobs), draw(st.integers(0, 3)), draw(st.integers(0, 5))
    )


@given(st.lists(spans(), max_size=8))
def test_every_view_has_one_length_and_follows_the_spans(parts):
    sequence = TokenSequence(tuple(parts))

    views = (sequence.token_ids, sequence.loss_mask, sequence.logprobs, sequence.turn_index)
    flat = [(token, span, place) for span in parts for place, token in enumerate(span.token_ids)]
    assert [len(view) for view in views] == [len(flat)] * 4
    assert len(sequence) == len(flat)
    for (token, span, place), got, mask, logprob, turn in zip(flat, *views, strict=True):
        assert (got, mask, turn) == (token, span.source == "model", span.turn)
        assert logprob == (span.logprobs[place] if mask else 0.0)
    assert sequence.num_trained_tokens == sum(sequence.loss_mask)


@given(st.lists(spans(), max_size=6), st.integers(0, 40))
def test_a_cut_is_a_prefix_of_every_view(parts, length):
    whole = TokenSequence(tuple(parts))

    cut = whole.cut(length)

    assert len(cut) == min(length, len(whole))
    for view in ("token_ids", "loss_mask", "logprobs", "turn_index"):
        assert getattr(cut, view) == getattr(whole, view)[: len(cut)]
    assert not cut.spans or sum(map(len, cut.spans[:-1])) < length, "no span begins where the cut is"


def test_a_cut_to_a_negative_length_is_refused():
    with pytest.raises(ValueError, match="-1 tokens"):
        TokenSequence(()).cut(-1)


@given(st.lists(spans(), max_size=8))
def test_appending_never_changes_what_was_there(parts):
    builder = SequenceBuilder()
    flat = builder.token_ids
    frozen = []
    for span in parts:
        builder.append(
            span.source,
            span.token_ids,
            logprobs=span.logprobs,
            weights_version=span.weights_version,
            turn=span.turn,
        )
        frozen.append(builder.freeze())
        assert builder.token_ids is flat
        assert flat == frozen[-1].token_ids
        assert len(builder) == len(frozen[-1])

    for earlier, later in pairwise(frozen):
        assert later.token_ids[: len(earlier)] == earlier.token_ids
        assert later.logprobs[: len(earlier)] == earlier.logprobs
    assert len(builder.freeze().spans) == sum(bool(span.token_ids) for span in parts)


@given(
    ids.filter(bool),
    st.data(),
    st.sampled_from(["fewer", "more", "none", "bad value", "gap", "overlap", "short"]),
)
def test_a_completion_that_does_not_fit_together_is_refused_and_leaves_nothing(token_ids, data, fault):
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2, 3])
    size = len(token_ids)
    logprobs = [-0.5] * size
    ranges = [(0, 0, size)]
    if fault == "fewer":
        logprobs = logprobs[1:]
    elif fault == "more":
        logprobs = [*logprobs, -0.5]
    elif fault == "none":
        logprobs = None
    elif fault == "bad value":
        logprobs[data.draw(st.integers(0, size - 1))] = data.draw(bad_logprobs)
    elif fault == "gap":
        ranges = [(0, 0, size), (1, size + 1, size + 2)]
    elif fault == "overlap":
        ranges = [(0, 0, size), (1, 0, size)]
    else:
        ranges = [(0, 0, size - 1)]

    with pytest.raises(AlignmentError):
        builder.append_completion(token_ids, logprobs, ranges, turn=0)

    assert builder.token_ids == [1, 2, 3]
    assert len(builder.freeze().spans) == 1


@given(ids.filter(lambda many: len(many) > 1), st.data())
def test_a_completion_across_weight_updates_keeps_tokens_and_versions(token_ids, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, len(token_ids) - 1), max_size=3)))
    edges = [0, *cuts, len(token_ids)]
    ranges = [(7 + part, start, end) for part, (start, end) in enumerate(pairwise(edges))]
    logprobs = [-0.25 * place for place in range(len(token_ids))]
    builder = SequenceBuilder()

    builder.append_completion(token_ids, logprobs, ranges, turn=2)

    sequence = builder.freeze()
    assert sequence.token_ids == token_ids
    assert sequence.logprobs == logprobs
    assert [(span.weights_version, len(span)) for span in sequence.spans] == [
        (v, b - a) for v, a, b in ranges
    ]


@pytest.mark.parametrize("source", ["prompt", "env", "other"])
def test_only_the_policy_s_tokens_have_logprobs(source):
    with pytest.raises(AlignmentError, match="must not have logprobs"):
        TokenSpan(source, (1,), (-0.1,))


def test_an_unknown_source_is_refused_by_name():
    with pytest.raises(AlignmentError, match="'user'"):
        TokenSpan("user", (1,))


@pytest.mark.parametrize("reason", list(StopReason))
def test_terminated_truncated_and_failed_are_told_apart_by_the_reason_alone(reason):
    assert reason.terminated + reason.truncated + reason.failed == 1


def record(**given) -> Trajectory:
    base = {"env_id": "e", "task_id": "t", "seed": 0, "group_id": "g", "stop_reason": StopReason.FINAL_ANSWER}
    return Trajectory(**{**base, **given})


def turn_of(builder: SequenceBuilder, size: int, *, reward: float = 0.0, index: int = 0) -> Turn:
    return Turn(
        index, {"role": "assistant", "content": "x"}, "stop", size, start=len(builder) - size, reward=reward
    )


def test_a_failed_episode_cannot_be_trainable_and_a_good_one_has_no_error():
    error = EpisodeError("env", "RuntimeError", "broke")
    with pytest.raises(AlignmentError, match="does not fit error"):
        record(stop_reason=StopReason.ERROR, untrainable_reason="x")
    with pytest.raises(AlignmentError, match="does not fit error"):
        record(error=error)
    with pytest.raises(AlignmentError, match="why it is not trainable"):
        record(stop_reason=StopReason.ABORTED, error=error)
    assert not record(stop_reason=StopReason.ABORTED, error=error, untrainable_reason="engine").trainable


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_is_finite(reward):
    with pytest.raises(AlignmentError, match="not finite"):
        record(reward=reward)


def test_tokens_under_the_mask_belong_to_turns():
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2])
    builder.append_completion([3, 4], [-0.1, -0.2], [(0, 0, 2)], turn=0)
    sequence = builder.freeze()

    with pytest.raises(AlignmentError, match="2 tokens are under the loss mask"):
        record(sequences=(sequence,))
    with pytest.raises(AlignmentError, match="but its sequence has only"):
        record(sequences=(sequence,), turns=(Turn(0, {"role": "assistant"}, "stop", 2, start=3),))
    whole = record(sequences=(sequence,), turns=(turn_of(builder, 2, reward=1.0),), reward=1.0)
    assert whole.turn_rewards == (1.0,)
    assert whole.weights_versions == (0,)
    assert pickle.loads(pickle.dumps(whole)) == whole


def test_a_group_is_of_one_task_and_never_empty():
    with pytest.raises(AlignmentError, match="at least one"):
        TrajectoryGroup(())
    with pytest.raises(AlignmentError, match="same environment, task and group"):
        TrajectoryGroup((record(), record(task_id="u")))
    group = TrajectoryGroup((record(reward=1.0), record(member=1)))
    assert (group[0].reward, group[-1].member) == (1.0, 1)
    assert group.outcomes == {StopReason.FINAL_ANSWER: 2}
    assert len(group.usable) == 1
