"""What a session captured: its sequences while they grow, its turns, and the record of both.

1. Every completion stands in exactly one sequence as what the model sampled. A sequence that begins with
   tokens of another one has them as its prompt, so each sampled token is trained at most once.
2. Completions that are left out of training (a reply that no client received, an auxiliary conversation, a
   reply that was constrained to a form and has no supports) are
   recorded with the source `other`, and counted by their cause. What a client cut off a reply is no part of
   the conversation: its tokens are counted and not recorded.
3. In the record the turns of a sequence stand together. The sequence that was used last stands last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from agentenv.core.images import ImageTokens
from agentenv.core.messages import CallStatus, JsonValue, Message, ToolCall, ToolResult, text_of
from agentenv.core.refusals import Refusal
from agentenv.core.sequence import SequenceBuilder, Source, TokenSequence, images_of
from agentenv.core.trajectory import Rewrite, Turn
from agentenv.endpoint.matching import Node
from agentenv.engine.interface import Completion, FinishReason, Sampling

__all__ = ["Captured", "CapturedTurn", "Choice", "OpenSequence", "capture", "results_of"]


@dataclass(slots=True, kw_only=True)
class CapturedTurn:
    """One reply of the model, with what came before it and what the client answered."""

    number: int
    """Number of the reply in the order in which replies were recorded."""
    sequence: int
    start: int
    num_tokens: int
    message: Message
    """The reply as the client was sent it."""
    calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    asked: tuple[Message, ...]
    """Messages since the reply before it in the sequence; for the first reply the whole conversation."""
    tools: Sequence[Mapping[str, JsonValue]]
    sampling: Sampling
    completion: Completion | None = None
    """The sampled tokens; None if the engine only speaks text."""
    asked_version: int = 0
    """Version of the weights when the request was made."""
    timings: dict[str, float] = field(default_factory=dict[str, float])
    results: tuple[ToolResult, ...] = ()
    delivered: bool = False
    """True once a client has received the reply."""
    repeats: int = 0
    """How often the reply was sent again to a client that repeated its request."""
    cut_tokens: int = 0
    """Number of tokens at the end of the reply that the client cut off before it went on."""
    used: bool = False
    """True if a later request contains a part of the reply, though it does not go on from it."""


@dataclass(slots=True, kw_only=True)
class OpenSequence:
    """A sequence of tokens that still grows."""

    # Invariant: the first `size` of `token_ids` are the tokens of `pieces`; more are those of a request that
    # is being answered.
    cause: str
    """How it began: `new`, `edited`, `tools`, `system`, `forked` or `parallel`."""
    parent: int | None = None
    shared_tokens: int = 0
    token_ids: list[int] = field(default_factory=list[int])
    size: int = 0
    pieces: list[tuple[Source, Sequence[int], CapturedTurn | int]] = field(
        default_factory=list[tuple[Source, Sequence[int], "CapturedTurn | int"]]
    )
    """Source, tokens, and the turn itself, or the number of the turn that the tokens follow."""
    turns: list[CapturedTurn] = field(default_factory=list[CapturedTurn])
    tail: Node | None = None
    """The last reply; None while there is none."""
    busy: bool = False
    """True while a request that goes on from the tail is being answered."""

    def append(self, source: Source, token_ids: Sequence[int], turn: CapturedTurn | int) -> None:
        """Append tokens, which may stand at the end of `token_ids` already."""
        if token_ids:
            self.pieces.append((source, token_ids, turn))
            self.token_ids[self.size :] = token_ids
            self.size += len(token_ids)

    @property
    def images(self) -> list[ImageTokens]:
        """The images of the pieces, by their places in the sequence."""
        images: list[ImageTokens] = []
        start = 0
        for _, token_ids, _ in self.pieces:
            images += [image.moved(start) for image in images_of(token_ids)]
            start += len(token_ids)
        return images

    @property
    def is_used(self) -> bool:
        """True if a later request contains a part of one of its replies."""
        return any(turn.used for turn in self.turns)

    @property
    def has_tools(self) -> bool:
        """True if the model was offered tools in it."""
        return any(turn.tools for turn in self.turns)


Choice: TypeAlias = Literal["main", "all"] | Callable[[OpenSequence], bool]
"""Which sequences are trained.

`main` are those that have tools, go on from a reply or were continued, or of which a later request contains a
part, or all if there is none of these; a function decides for each sequence.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The record of a session."""

    turns: tuple[Turn, ...] = ()
    sequences: tuple[TokenSequence, ...] = ()
    messages: tuple[Message, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    tools: tuple[Mapping[str, JsonValue], ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of sampled tokens that are not trained, by cause."""
    has_policy_tokens: bool = False
    untrainable_reason: str = ""
    """Why tokens that would be trained must not be; empty if they may."""
    sampling: tuple[Sampling, ...] = ()
    """Sampling settings of each turn."""


def capture(sequences: Sequence[OpenSequence], choice: Choice = "main") -> Captured:
    """Return the record of the sequences so far.

    Args:
        sequences: the sequences in the order in which they began.
        choice: which sequences are trained.
    """
    used = [number for number, sequence in enumerate(sequences) if sequence.turns]
    used.sort(key=lambda number: sequences[number].turns[-1].number)
    ordered = [sequences[number] for number in used]
    place = {number: index for index, number in enumerate(used)}
    index_of = {turn.number: index for index, turn in enumerate(_turns_of(ordered))}
    note_used(ordered)
    out = _left_out(ordered, choice)
    frozen = tuple(_frozen(sequence, index_of, out) for sequence in ordered)
    has_tokens = any(sequence.pieces for sequence in ordered)
    return Captured(
        turns=tuple(_turn(turn, ordered, index_of, place) for turn in _turns_of(ordered)),
        sequences=frozen if has_tokens else (),
        messages=_messages(ordered),
        rewrites=tuple(_rewrites(ordered, index_of, place)),
        tools=tuple(ordered[0].turns[0].tools) if ordered else (),
        left_out=_counted(ordered, out),
        sampling=tuple(turn.sampling for turn in _turns_of(ordered)),
        has_policy_tokens=any(sequence.num_trained_tokens for sequence in frozen),
        untrainable_reason=next(
            filter(None, (_unfit(turn) for turn in _turns_of(ordered) if turn.number not in out)), ""
        ),
    )


def note_used(sequences: Sequence[OpenSequence]) -> None:
    """Note which replies a later request contains a part of, such as a plan that others work by."""
    turns = sorted(_turns_of(sequences), key=lambda turn: turn.number)
    for sequence in sequences:
        if len(sequence.turns) == 1 and not sequence.has_tools:
            turn = sequence.turns[0]
            later = (message for other in turns if other.number > turn.number for message in other.asked)
            turn.used = turn.used or is_used_in(turn.message, turn.asked, later)


def _unfit(turn: CapturedTurn) -> str:
    return "" if turn.completion is None else turn.completion.unfit_for_training(turn.sampling)


def _turns_of(sequences: Sequence[OpenSequence]) -> list[CapturedTurn]:
    return [turn for sequence in sequences for turn in sequence.turns]


def _left_out(sequences: Sequence[OpenSequence], choice: Choice) -> dict[int, str]:
    """Return why turns are not trained, by the number of the turn."""
    chosen = [_is_chosen(sequence, choice) for sequence in sequences]
    if choice == "main" and not any(chosen):
        chosen = [True] * len(chosen)
    out: dict[int, str] = {}
    for sequence, trained in zip(sequences, chosen, strict=True):
        for turn in sequence.turns:
            if not trained:
                out[turn.number] = "auxiliary"
            elif not turn.delivered:
                out[turn.number] = "undelivered"
            elif turn.sampling.grammar and _unfit(turn):
                # The episode's other turns are trained: the request decides this, and not what was sampled.
                out[turn.number] = "constrained"
    return out


def _counted(sequences: Sequence[OpenSequence], out: Mapping[int, str]) -> dict[str, int]:
    """Return the number of sampled tokens that are not trained, by cause."""
    counts: Counter[str] = Counter()
    for turn in _turns_of(sequences):
        counts["cut"] += turn.cut_tokens
        if turn.number in out:
            counts[out[turn.number]] += turn.num_tokens
    return {cause: count for cause, count in counts.items() if count}


def _is_chosen(sequence: OpenSequence, choice: Choice) -> bool:
    if callable(choice):
        return choice(sequence)
    auxiliary = sequence.cause == "new" and len(sequence.turns) == 1
    return choice == "all" or not auxiliary or sequence.has_tools or sequence.is_used


def _frozen(sequence: OpenSequence, index_of: Mapping[int, int], out: Mapping[int, str]) -> TokenSequence:
    builder = SequenceBuilder()
    for source, token_ids, turn in sequence.pieces:
        if isinstance(turn, int):
            builder.append(source, token_ids, turn=index_of.get(turn, -1))
            continue
        index, completion = index_of[turn.number], turn.completion
        if completion is None or turn.number in out or not completion.sampled_by_policy:
            builder.append("other", token_ids, turn=index)
            continue
        ranges = completion.version_ranges or ((turn.asked_version, 0, len(token_ids)),)
        builder.append_completion(
            token_ids, completion.logprobs, ranges, turn=index, supports=completion.supports
        )
        builder.route(completion.routed_experts)
    return builder.freeze()


def _turn(
    turn: CapturedTurn,
    sequences: Sequence[OpenSequence],
    index_of: Mapping[int, int],
    place: Mapping[int, int],
) -> Turn:
    return Turn(
        index=index_of[turn.number],
        message=turn.message,
        finish_reason=turn.finish_reason,
        num_tokens=turn.num_tokens,
        sequence=place[turn.sequence],
        start=turn.start,
        tool_calls=turn.calls,
        tool_results=turn.results or _unanswered(turn, sequences[place[turn.sequence]]),
        sampling=turn.sampling.record(),
        timings=turn.timings,
    )


def _messages(sequences: Sequence[OpenSequence]) -> tuple[Message, ...]:
    """Return the messages of all sequences; those with which a later one begins stand in its rewrite."""
    messages: list[Message] = []
    for number, sequence in enumerate(sequences):
        for position, turn in enumerate(sequence.turns):
            if position or not number:
                messages.extend(turn.asked)
            messages.append(turn.message)
            if turn is sequence.turns[-1]:
                results = turn.results or _unanswered(turn, sequence)
                messages.extend(result.to_message() for result in results)
    return tuple(messages)


def _unanswered(turn: CapturedTurn, sequence: OpenSequence) -> tuple[ToolResult, ...]:
    """Return results for the calls of a conversation's last turn, which the agent did not answer."""
    if turn.results or turn is not sequence.turns[-1]:
        return ()
    live = (call for call in turn.calls if call.status is not CallStatus.IN_THINKING)
    return tuple(Refusal.LEFT_BY_AGENT.answer(call) for call in live)


def _rewrites(
    sequences: Sequence[OpenSequence], index_of: Mapping[int, int], place: Mapping[int, int]
) -> list[Rewrite]:
    return [
        Rewrite(
            index_of[sequence.turns[0].number],
            sequence.cause,
            sequence.turns[0].asked,
            None if sequence.parent is None else place.get(sequence.parent),
            sequence.shared_tokens,
            tuple(sequence.turns[0].tools),
        )
        for sequence in sequences[1:]
    ]


def results_of(calls: Sequence[ToolCall], messages: Sequence[Message]) -> tuple[ToolResult, ...]:
    """Return the results of calls that messages of a client contain, in call order."""
    said = {message.get("tool_call_id"): message.get("content") or "" for message in messages}
    live = [call for call in calls if call.status is not CallStatus.IN_THINKING]
    return tuple(ToolResult(call.id, call.name, said[call.id]) for call in live if call.id in said)


# A line of the reply that its own request did not contain, and that a later one does, was taken over. Short
# lines prove nothing, so they are not compared. Lines of JSON end at quotation marks too.
MIN_CHARS = 16
"""Shortest line that tells where it is from."""
_LINE_ENDS = re.compile(r'[\n"]+')


def is_used_in(reply: Message, asked: Sequence[Message], later: Iterable[Message]) -> bool:
    """Return whether a later message contains a part of a reply.

    Args:
        reply: the reply.
        asked: the messages of its request.
        later: messages of later requests.
    """
    before = "\n".join(text_of(message) for message in asked)
    text = text_of(reply)
    lines = [line for line in _lines(text) if line not in before]
    if not lines:
        return False
    return any(
        any(line in said for line in lines)
        or any(line in text and line not in before for line in _lines(said))
        for said in map(text_of, later)
    )


def _lines(text: str) -> list[str]:
    lines = (line.strip() for line in _LINE_ENDS.split(text))
    return [line for line in lines if len(line) >= MIN_CHARS]
