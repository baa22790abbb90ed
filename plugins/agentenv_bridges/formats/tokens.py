"""Read episodes back from rows with a prompt, a response, a mask and logprobs, as trainers take them.

A row does not say where a turn ends, which weights sampled it, and who wrote the tokens outside the mask.
Rows of ours say it in the fact `spans`. Without it, each run of masked-in tokens is a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias, cast

from agentenv.core import (
    AgentEnvError,
    JsonValue,
    Message,
    SequenceBuilder,
    Supports,
    TokenSequence,
    Trajectory,
    Turn,
    UsageError,
)
from agentenv_bridges.formats.facts import episode_of, turn_facts

__all__ = ["Decode", "TokenRow", "cut_spans", "episodes_of", "sequence_of", "spans_of", "turns_of"]

NO_LOGPROBS = "imported from rows without logprobs of the sampled tokens"

Decode: TypeAlias = Callable[[list[int]], str]
"""Returns the text of token ids, special tokens included."""


_Span: TypeAlias = tuple[Any, int, int, int | None, Any]
"""Source, turn, length, weights version and supports of a span."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One row: a token sequence of an episode."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    """As long as the response; true for tokens that the policy sampled."""
    logprobs: list[float] | None
    """As long as the response; None if the row has none, and then the tokens are not trained on."""
    facts: Mapping[str, Any]
    """Facts of the episode, with `sequence` (index of the row in its episode) and `spans`."""
    prompt: Sequence[Message] = ()
    """Messages of the prompt, if the format has them."""


def spans_of(sequence: TokenSequence, length: int) -> dict[str, JsonValue]:
    """Return what is known of the spans of the first `length` tokens.

    That is their source, turn, length, weights version and, where a cut was kept, the support of each token.
    """
    spans = [span for span in sequence.cut(length).spans if len(span)]
    facts: dict[str, JsonValue] = {
        "source": [span.source for span in spans],
        "turn": [span.turn for span in spans],
        "length": [len(span) for span in spans],
        "weights_version": [span.weights_version for span in spans],
    }
    if any(span.supports for span in spans):
        kept = [None if span.supports is None else span.supports.tolist() for span in spans]
        facts["supports"] = cast("JsonValue", kept)
    return facts


def cut_spans(spans: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return what `spans_of` says about the first `length` tokens."""
    sizes: list[int] = []
    for size in spans["length"]:
        sizes.append(min(size, length))
        length -= sizes[-1]
    cut = {**spans, "length": sizes}
    if "supports" in spans:
        cut["supports"] = [kept and kept[:size] for kept, size in zip(spans["supports"], sizes, strict=True)]
    return cut


def sequence_of(row: TokenRow, where: str) -> TokenSequence:
    """Return the token sequence of a row.

    Raises:
        UsageError: Ids, mask, logprobs and spans disagree.
    """
    size, total = len(row.response_ids), len(row.prompt_ids) + len(row.response_ids)
    given = [0.0] * size if row.logprobs is None else row.logprobs
    if not len(row.mask) == len(given) == size:
        raise UsageError(
            f"{where} has {size} response tokens, but a mask of {len(row.mask)} and {len(given)} logprobs"
        )
    spans = row.facts.get("spans")
    try:
        parts = list(_recorded(spans)) if isinstance(spans, dict) else list(_runs(row))
        described = sum(length for _, _, length, _, _ in parts)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{where} has `spans` that cannot be read: {error!r}") from error
    if described != total:
        raise UsageError(f"{where} has {total} tokens, but its spans describe {described}")
    ids = [*row.prompt_ids, *row.response_ids]
    logprobs = [*[0.0] * len(row.prompt_ids), *given]
    builder = SequenceBuilder()
    for source, turn, length, version, supports in parts:
        start = len(builder)
        values = logprobs[start : start + length] if source == "model" else None
        builder.append(
            source,
            ids[start : start + length],
            logprobs=values,
            weights_version=version,
            turn=turn,
            supports=None if supports is None or not length else Supports.of(supports),
        )
    return builder.freeze()


def _recorded(spans: Mapping[str, Any]) -> Iterator[_Span]:
    names = ("source", "turn", "length", "weights_version")
    supports = spans.get("supports") or [None] * len(spans["source"])
    yield from zip(*(spans[name] for name in names), supports, strict=True)


def _runs(row: TokenRow) -> Iterator[_Span]:
    if row.prompt_ids:
        yield "prompt", -1, len(row.prompt_ids), None, None
    sampled = "other" if row.logprobs is None else "model"
    turn = -1
    for trained, run in groupby(map(bool, row.mask)):
        turn += trained
        yield sampled if trained else "env", turn, len(list(run)), None, None


def turns_of(
    sequences: Sequence[TokenSequence], facts: Mapping[str, Any], decode: Decode | None
) -> list[Turn]:
    """Return the turns that sampled the tokens; their text is decoded, or empty without `decode`."""
    places: dict[int, tuple[int, int, int]] = {}
    for number, sequence in enumerate(sequences):
        position = 0
        for span in sequence.spans:
            if span.source in {"model", "other"} and span.turn >= 0:
                at, start, length = places.get(span.turn, (number, position, 0))
                places[span.turn] = (at, start, length + (len(span) if at == number else 0))
            position += len(span)
    recorded = facts.get("turn_rewards")
    count = max([len(recorded) if isinstance(recorded, list) else 0, *(turn + 1 for turn in places)])
    turns: list[Turn] = []
    for index, (reward, finish_reason) in enumerate(turn_facts(facts, count)):
        at, start, length = places.get(index, (0, 0, 0))
        ids = sequences[at].token_ids[start : start + length] if sequences else []
        text = "" if decode is None else decode(ids)
        message: Message = {"role": "assistant", "content": text}
        turns.append(Turn(index, message, finish_reason, length, at, start, reward=reward))
    return turns


def episodes_of(
    rows: Iterable[Mapping[str, Any]],
    parse: Callable[[Mapping[str, Any]], TokenRow],
    *,
    env_id: str,
    decode: Decode | None = None,
) -> Iterator[Trajectory]:
    """Yield the episodes of rows; consecutive rows of one episode become its sequences.

    Args:
        rows: the rows.
        parse: function that reads a row of the format.
        env_id: environment id for rows that name none.
        decode: function that returns the text of token ids.

    Raises:
        UsageError: A row lacks a field, or its lists disagree; the error names the row.
    """
    held: list[tuple[TokenRow, TokenSequence]] = []
    episode = 0
    for number, raw in enumerate(rows):
        try:
            row = parse(raw)
            sequence = sequence_of(row, f"row {number}")
        except UsageError:
            raise
        except (AgentEnvError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"row {number} cannot be read: {error!r}") from error
        if held and not row.facts.get("sequence"):
            yield _episode(held, episode, env_id, decode)
            held, episode = [], episode + 1
        held.append((row, sequence))
    if held:
        yield _episode(held, episode, env_id, decode)


def _episode(
    held: Sequence[tuple[TokenRow, TokenSequence]], number: int, env_id: str, decode: Decode | None
) -> Trajectory:
    first = held[0][0]
    sequences = [sequence for _, sequence in held if len(sequence)]
    turns = turns_of(sequences, first.facts, decode)
    return episode_of(
        first.facts,
        env_id=env_id,
        task_id=f"row-{number}",
        turns=turns,
        sequences=sequences,
        messages=_messages(first, sequences, turns, decode),
        untrainable_reason="" if all(row.logprobs is not None for row, _ in held) else NO_LOGPROBS,
    )


def _messages(
    row: TokenRow, sequences: Sequence[TokenSequence], turns: Sequence[Turn], decode: Decode | None
) -> list[Message]:
    """Return the prompt and, with `decode`, the text of each completion and observation."""
    messages = list(row.prompt)
    if decode is None:
        return messages
    if not messages:
        messages.append({"role": "user", "content": decode(row.prompt_ids)})
    said: set[int] = set()
    for sequence in sequences:
        for span in sequence.spans:
            if span.source == "env":
                messages.append({"role": "user", "content": decode(list(span.token_ids))})
            elif span.source in {"model", "other"} and span.turn >= 0 and span.turn not in said:
                said.add(span.turn)
                messages.append(turns[span.turn].message)
    return messages
