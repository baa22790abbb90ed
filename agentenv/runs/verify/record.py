"""The checks of a stored episode that need nothing but its record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import isclose

from agentenv.core.images import hash_of
from agentenv.core.messages import CallStatus, Message
from agentenv.core.sequence import TokenSequence, TokenSpan
from agentenv.core.trajectory import StopReason, Trajectory
from agentenv.runs.store.codec import digest_of
from agentenv.runs.verify.findings import Verification

__all__ = ["answers_of", "check_digest", "check_record"]


def check_record(record: Trajectory, checks: Verification) -> None:
    """Check that turns, spans, messages, tool results and rewards agree with each other."""
    checks.checked["record"] += 1
    for turn, complaint in (*_wrong_turns(record), *_wrong_spans(record), *_lost_images(record)):
        checks.add("record", turn, complaint)
    answers = answers_of(record)
    if answers is None:
        checks.add(
            "record", None, "the messages of the turns are not those of the conversation, in its order"
        )
        return
    for turn, said in zip(record.turns, answers[1:], strict=True):
        results = [result.to_message() for result in turn.tool_results]
        if list(said[: len(results)]) != results:
            checks.add("record", turn.index, "the messages after it do not begin with its tool results")


def check_digest(record: Trajectory, checks: Verification) -> None:
    """Check that a record is the one that the run stored; older runs stored no digests."""
    if record.digest:
        checks.checked["digest"] += 1
        if digest_of(record) != record.digest:
            checks.add("digest", None, "the record was changed after the run had stored it")


def _wrong_turns(record: Trajectory) -> Iterator[tuple[int | None, str]]:
    # The last turn of an episode that was cut short may have no results.
    unanswered = record.stop_reason.failed or record.stop_reason is StopReason.DEADLINE
    answers = answers_of(record) or [()] * (len(record.turns) + 1)
    for position, turn in enumerate(record.turns):
        if turn.index != position:
            yield position, f"its index is {turn.index}"
        asked = [call.id for call in turn.tool_calls if call.status is not CallStatus.IN_THINKING]
        answered = [result.tool_call_id for result in turn.tool_results]
        last = position == len(record.turns) - 1
        # Some agents tell the model what a call returned in a message of the user.
        in_words = any(message["role"] == "user" for message in answers[position + 1][:1])
        if asked != answered and not (((last and unanswered) or in_words) and not answered):
            yield position, f"its tool calls are {asked}, but the results answer {answered}"
    if complaint := _wrong_end(record, answers):
        yield len(record.turns) - 1, complaint
    if record.reward is not None and record.turns:
        total = sum(record.turn_rewards)
        if not isclose(total, record.reward, rel_tol=1e-6, abs_tol=1e-6):
            yield None, f"the turn rewards sum to {total}, but the reward is {record.reward}"


def _wrong_end(record: Trajectory, answers: Sequence[Sequence[Message]]) -> str:
    """Return why an episode cannot have ended at the limit of turns; empty if it can."""
    if record.stop_reason is not StopReason.MAX_TURNS or not record.turns:
        return ""
    last = record.turns[-1]
    # The runner answers a text of the model also at its last turn, if the episode does not end with it. The
    # agents that it does not drive, silent users and environments that answer nothing are not told apart.
    answered = last.tool_calls or answers[-1] or not last.timings.get("env_s")
    if answered or record.metrics.get("user_turns") or not record.tools:
        return ""
    earlier = [answers[turn.index + 1] for turn in record.turns[:-1] if not turn.tool_calls]
    return "" if not all(earlier) else "nothing answers its text, which ends the episode, and not max_turns"


def _lost_images(record: Trajectory) -> Iterator[tuple[int | None, str]]:
    for number, sequence in enumerate(record.sequences):
        for image in sequence.images:
            if hash_of(image.data) != image.sha256:
                yield None, f"the image {image.sha256[:12]} of sequence {number} is missing or was changed"


def _wrong_spans(record: Trajectory) -> Iterator[tuple[int | None, str]]:
    if not record.sequences:
        return
    ends = [0] * len(record.sequences)
    for turn in record.turns:
        if not 0 <= turn.sequence < len(record.sequences):
            yield turn.index, f"it names sequence {turn.sequence} of {len(record.sequences)}"
            return
        if turn.start < ends[turn.sequence]:
            yield turn.index, f"it begins at token {turn.start}, before the end of the turn before it"
        ends[turn.sequence] = turn.end
        sampled = sum(
            len(span)
            for start, span in _placed(record.sequences[turn.sequence])
            if span.turn == turn.index
            and span.source in {"model", "other"}
            and turn.start <= start
            and start + len(span) <= turn.end
        )
        if sampled != turn.num_tokens:
            yield turn.index, f"it sampled {turn.num_tokens} tokens, but its spans hold {sampled}"
    ranges = {(turn.sequence, turn.index): (turn.start, turn.end) for turn in record.turns}
    for number, sequence in enumerate(record.sequences):
        for start, span in _placed(sequence):
            first, end = ranges.get((number, span.turn), (0, 0))
            if span.trained and not first <= start < start + len(span) <= end:
                yield span.turn, f"sampled tokens from {start} of sequence {number} are in no turn"


def _placed(sequence: TokenSequence) -> Iterator[tuple[int, TokenSpan]]:
    """Yield each span with the position of its first token."""
    starts = accumulate(map(len, sequence.spans), initial=0)
    return zip(starts, sequence.spans, strict=False)


def answers_of(record: Trajectory) -> list[Sequence[Message]] | None:
    """Return the messages before the first turn, and those after each turn.

    Returns:
        One list more than there are turns; None if a turn's message is not in the conversation.
    """
    # From the end, because prompts may contain messages of an assistant and answers rarely do.
    parts: list[Sequence[Message]] = []
    end = len(record.messages)
    for turn in reversed(record.turns):
        place = next((at for at in range(end - 1, -1, -1) if record.messages[at] == turn.message), None)
        if place is None:
            return None
        parts.append(record.messages[place + 1 : end])
        end = place
    return [record.messages[:end], *reversed(parts)]
