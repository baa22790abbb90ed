"""Each field of an episode's record reaches every place that holds, shows, checks or exports records.

Two records that differ in one field must differ in each place. A new field therefore fails here until each
place has it, or until `EXEMPT` says why a place does without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

import pytest

from agentenv.core import (
    EpisodeError,
    ImageTokens,
    StopReason,
    Supports,
    TokenSequence,
    TokenSpan,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)
from agentenv.core.messages import CallStatus, ToolErrorKind
from agentenv.core.routed_experts import RoutedExperts
from agentenv.core.trajectory import Rewrite
from agentenv.runs.store import decode_trajectory, summarize
from agentenv.runs.store.codec import digest_of, encode_line, loads
from agentenv.runs.view.data import _row, episode_data
from agentenv_bridges.formats.facts import episode_of, facts_of

SHA = "a" * 64
CALL = ToolCall("c1", "add", '{"a": 1}', CallStatus.BAD_ARGUMENTS, "wrong", {"a": 1}, "<call>")
RESULT = ToolResult(
    "c1", "add", "3", ToolErrorKind.TIMEOUT, "trace", 0.5, trimmed=True, full_chars=9, repaired=True,
    max_tokens=8, full_output="outputs/1.txt",
)  # fmt: skip
TURN = Turn(
    0, {"role": "assistant", "content": "hi"}, "stop", 3, 0, 0, (CALL,), (RESULT,), 0.5,
    {"temperature": 1.0}, {"env_s": 0.1}, 1,
)  # fmt: skip
SPANS = (
    TokenSpan("prompt", (1, 2), images=(ImageTokens(0, 1, SHA),)),
    TokenSpan("model", (3, 4), (-0.5, -0.25), 7, 0, Supports.of([[3, 9], [4, 9]])),
)
RECORD = Trajectory(
    env_id="demo/Adder-v0",
    task_id="t1",
    seed=3,
    group_id="g1",
    stop_reason=StopReason.ABORTED,
    member=1,
    attempt=2,
    branch_of=4,
    shared_turns=1,
    turns=(TURN,),
    sequences=(TokenSequence(SPANS, RoutedExperts(bytes(6), 1, 2, 1)),),
    messages=({"role": "user", "content": "?"}, {"role": "assistant", "content": "hi"}),
    reward=0.5,
    rewards={"right": 0.5},
    error=EpisodeError("engine", "OSError", "gone", "trace", retryable=True),
    untrainable_reason="failed at engine",
    task={"x": 1},
    tools=({"type": "function", "function": {"name": "add"}},),
    rewrites=(Rewrite(0, "edited", ({"role": "user", "content": "!"},), 0, 1, ({"type": "function"},)),),
    metrics={"turns": 1.0},
    timings={"total_s": 1.0},
)

CHANGED: dict[str, Any] = {
    "Turn.start": 1,
    "Turn.num_tokens": 2,
    "Rewrite.tools": None,
    "Turn.finish_reason": "length",
    "Turn.sequence": 0,
    "TokenSpan.source": "env",
    "TokenSpan.images": (),
    "TokenSpan.supports": None,
    "TokenSpan.token_ids": (3, 9),
    "TokenSpan.logprobs": (-0.5, -0.125),
    "TokenSequence.routed_experts": None,
    "EpisodeError.boundary": "worker",
    "Trajectory.stop_reason": StopReason.ERROR,
}
"""Another value of a field whose type does not say one."""
DERIVED = {
    "Trajectory.digest": "is made from all the others",
    "Trajectory.other_seats": "are episodes of their own everywhere",
    "Trajectory.turns": "its fields are changed one by one",
    "Trajectory.sequences": "its fields are changed one by one",
    "Trajectory.error": "its fields are changed one by one",
    "Turn.sequence": "there is one sequence here",
    "Turn.tool_calls": "its fields are changed one by one",
    "Turn.tool_results": "its fields are changed one by one",
    "ToolCall.values": "follow from the arguments",
    "TokenSequence.spans": "their fields are changed one by one",
    "TokenSpan.source": "decides which other fields there are",
}

EXEMPT = {
    "view": {
        "Turn.message": "the conversation shows it",
        "TokenSequence.routed_experts": "a page with all experts of all tokens would be too large",
        "TokenSpan.supports": "a page with all supports would be too large",
    },
    "rows": dict.fromkeys(
        ("Turn", "ToolCall", "ToolResult", "Rewrite", "TokenSpan", "TokenSequence"),
        "each format writes turns, tokens and conversations in its own way",
    )
    | {
        "Trajectory.messages": "each format writes them in its own way",
        "Trajectory.tools": "each format writes them in its own way",
        "Trajectory.rewrites": "each format writes them in its own way",
        "EpisodeError.traceback": "it names paths of the machine",
        "EpisodeError.retryable": "nothing is retried after an import",
    },
}
"""Fields, or whole classes, that a place does without, and why."""


def stored(record: Trajectory) -> object:
    return decode_trajectory(loads(encode_line(record)))


def shown(record: Trajectory) -> object:
    return episode_data(record), _row(0, summarize(record), {}, {})


def exported_and_imported(record: Trajectory) -> object:
    given = facts_of(record)
    return episode_of(given, env_id="?", task_id="?", turns=(), untrainable_reason="")


PLACES: dict[str, Callable[[Trajectory], object]] = {
    "store": stored,
    "verifier": digest_of,
    "view": shown,
    "rows": exported_and_imported,
}


def other(name: str, value: Any) -> Any:
    """Return another value of the field's type."""
    if name in CHANGED:
        return CHANGED[name]
    match value:
        case bool():
            return not value
        case Enum():
            return next(each for each in type(value) if each is not value)
        case int() | float():
            return value + 1
        case str():
            return f"{value}~"
        case Mapping():
            return {**value, "new": next(iter(value.values()))}
        case tuple():
            return ()
        case _:
            pytest.fail(f"{name}: say another value in CHANGED, and give RECORD one that is not the default")


def replaced(record: Trajectory, kind: type, name: str, value: Any) -> Trajectory:
    """Return the record with another value of a field, wherever the class stands in it."""
    turn, sequence = record.turns[0], record.sequences[0]
    if kind is Trajectory:
        return replace(record, **{name: value})
    if kind is EpisodeError:
        return replace(record, error=replace(record.error, **{name: value}))  # pyright: ignore[reportArgumentType]
    if kind is Rewrite:
        return replace(record, rewrites=(replace(record.rewrites[0], **{name: value}),))
    if kind is TokenSequence:
        return replace(record, sequences=(replace(sequence, **{name: value}),))
    if kind is TokenSpan:
        place = 0 if name == "images" else 1
        spans = list(sequence.spans)
        spans[place] = replace(spans[place], **{name: value})
        return replace(record, sequences=(replace(sequence, spans=tuple(spans)),))
    if kind is ToolCall:
        turn = replace(turn, tool_calls=(replace(turn.tool_calls[0], **{name: value}),))
    elif kind is ToolResult:
        turn = replace(turn, tool_results=(replace(turn.tool_results[0], **{name: value}),))
    else:
        turn = replace(turn, **{name: value})
    return replace(record, turns=(turn,))


PARTS: dict[type, object] = {
    Trajectory: RECORD,
    Turn: TURN,
    ToolCall: CALL,
    ToolResult: RESULT,
    Rewrite: RECORD.rewrites[0],
    EpisodeError: RECORD.error,
    TokenSequence: RECORD.sequences[0],
    TokenSpan: SPANS[1],
}


def cases() -> Iterator[Any]:
    for kind in PARTS:
        for field in fields(kind):  # pyright: ignore[reportArgumentType]
            name = f"{kind.__name__}.{field.name}"
            for place in PLACES:
                left_out = EXEMPT.get(place, {})
                if name not in DERIVED and name not in left_out and kind.__name__ not in left_out:
                    yield pytest.param(place, kind, field.name, id=f"{place}-{name}")


@pytest.mark.parametrize(("place", "kind", "name"), list(cases()))
def test_each_field_of_the_record_reaches_each_place(place: str, kind: type, name: str):
    value = getattr(SPANS[0] if name == "images" else PARTS[kind], name)
    changed = replaced(RECORD, kind, name, other(f"{kind.__name__}.{name}", value))

    assert PLACES[place](changed) != PLACES[place](RECORD)


def test_the_record_has_no_class_that_is_not_looked_at():
    inside = {type(value) for part in PARTS.values() for value in values_in(part) if is_dataclass(value)}

    assert inside - {ImageTokens, RoutedExperts, Supports} <= set(PARTS)


def values_in(part: Any) -> Iterator[object]:
    for field in fields(part):
        value = getattr(part, field.name)
        yield from value if isinstance(value, tuple) else (value,)
