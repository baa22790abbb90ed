"""Convert trajectories to JSON and back without loss.

The conversion is written by hand, because token arrays are large and the set of types is small and fixed.
Unknown keys are ignored and missing keys take their default, so that older and newer files can be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from typing import Any, cast

from pydantic_core import from_json, to_json

from agentenv.core.messages import CallStatus, ToolCall, ToolErrorKind, ToolResult
from agentenv.core.trajectory import (
    EpisodeError,
    Rewrite,
    StopReason,
    TokenSequence,
    TokenSpan,
    Trajectory,
    Turn,
)

__all__ = ["decode_trajectory", "dumps", "encode_line", "encode_trajectory", "loads"]

_Json = dict[str, Any]
_MAX_DEPTH = 100
"""Depth at which a value that holds itself is cut."""


def dumps(value: object) -> str:
    """Return compact one-line JSON in ASCII; values without a JSON type become the nearest plain value.

    ASCII keeps lone surrogates and Unicode line separators out of the file, so that every record stays
    on one line. Values of environments may hold anything, also keys that JSON does not have and cycles.
    """
    try:
        return json.dumps(value, separators=(",", ":"), default=_plain)
    except Exception:  # noqa: BLE001 - methods of outside code convert some values, and may raise anything
        return json.dumps(_tame(value, 0), separators=(",", ":"))


def loads(text: str | bytes) -> Any:
    """Return the value of a JSON text that somebody else may have written.

    Raises:
        ValueError: The text is not JSON, or is nested too deep to be read.
    """
    with suppress(ValueError):  # this parser is faster, but takes no lone surrogates and less deep values
        return from_json(text)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    for method in ("model_dump", "tolist", "isoformat"):
        convert = getattr(value, method, None)
        if callable(convert):
            return convert()
    return repr(value)


def _tame(value: object, depth: int) -> object:
    """Return the nearest value that is certainly JSON; slower than `_plain`, for values that it cannot do."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth > _MAX_DEPTH:
        return "<nested too deep>"
    try:
        if isinstance(value, Mapping):
            items = cast("Mapping[object, object]", value).items()
            return {str(key): _tame(item, depth + 1) for key, item in items}
        if isinstance(value, (list, tuple)):
            return [_tame(item, depth + 1) for item in cast("Sequence[object]", value)]
        return _tame(_plain(value), depth + 1)
    except Exception:  # noqa: BLE001 - methods of outside code, which may raise anything
        return f"<a {type(value).__name__} that cannot be written>"


def _fill(kind: type, data: Mapping[str, Any], convert: Mapping[str, Callable[[Any], object]]) -> Any:
    """Build a dataclass from a JSON object; ignore unknown fields and use defaults for missing ones."""
    values = {
        name: convert[name](data[name]) if name in convert else data[name]
        for name, _ in _defaults(kind)
        if name in data
    }
    return kind(**values)


def _lean(value: Any, *, skip: frozenset[str] = frozenset()) -> _Json:
    """Return the fields of a flat dataclass that differ from their defaults."""
    out: _Json = {}
    for name, default in _defaults(type(value)):
        if name in skip:
            continue
        item = getattr(value, name)
        # The types are compared too: 1 == 1.0 == True, but each must be read back as what it was.
        if type(item) is not type(default) or item != default:
            out[name] = item
    return out


@cache
def _defaults(kind: type) -> tuple[tuple[str, object], ...]:
    """Return the name and the default of each field of a dataclass; nobody may change the defaults."""
    return tuple(
        (field.name, field.default if field.default_factory is MISSING else field.default_factory())
        for field in fields(kind)
    )


def encode_line(trajectory: Trajectory) -> bytes:
    """Return the line of a trajectory in `trajectories.jsonl`, with its line break."""
    out = encode_trajectory(trajectory)
    # Nearly all of a line are the numbers of its tokens, which this function writes five times as fast.
    tokens = out.pop("sequences")
    try:
        numbers = to_json(tokens)
    except ValueError:  # numbers of other kinds, such as those of numpy
        numbers = dumps(tokens).encode()
    return b'%b,"sequences":%b}\n' % (dumps(out).encode()[:-1], numbers)


def encode_trajectory(trajectory: Trajectory) -> _Json:
    """Return a trajectory as plain JSON values; fields with their default value are left out."""
    out = _lean(trajectory, skip=frozenset({"turns", "sequences", "rewrites", "other_seats"}))
    if trajectory.error is not None:
        out["error"] = _lean(trajectory.error)
    if trajectory.rewrites:
        out["rewrites"] = [_lean(rewrite) for rewrite in trajectory.rewrites]
    out["turns"] = [_encode_turn(turn) for turn in trajectory.turns]
    out["sequences"] = [[_lean(span) for span in sequence.spans] for sequence in trajectory.sequences]
    return out


def _encode_turn(turn: Turn) -> _Json:
    out = _lean(turn, skip=frozenset({"tool_calls", "tool_results"}))
    if turn.tool_calls:
        out["tool_calls"] = [_lean(call, skip=frozenset({"values"})) for call in turn.tool_calls]
    if turn.tool_results:
        out["tool_results"] = [_lean(result) for result in turn.tool_results]
    return out


def _optional(kind: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda value: None if value is None else kind(value)


def _span(data: _Json) -> TokenSpan:
    return _fill(TokenSpan, data, {"token_ids": tuple, "logprobs": _optional(tuple)})


def _turn(data: _Json) -> Turn:
    calls = {"status": CallStatus}
    results = {"error_kind": _optional(ToolErrorKind)}
    return _fill(
        Turn,
        data,
        {
            "tool_calls": lambda items: tuple(_fill(ToolCall, item, calls) for item in items),
            "tool_results": lambda items: tuple(_fill(ToolResult, item, results) for item in items),
        },
    )


def decode_trajectory(data: _Json) -> Trajectory:
    """Return the trajectory that a JSON object describes.

    Raises:
        AlignmentError: The object breaks an invariant of a trajectory.
        ValueError: The object does not describe a trajectory.
    """
    try:
        return _decode(data)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"it does not describe an episode: {type(error).__name__}: {error}") from error


def _decode(data: _Json) -> Trajectory:
    return _fill(
        Trajectory,
        data,
        {
            "stop_reason": StopReason,
            "turns": lambda items: tuple(map(_turn, items)),
            "sequences": lambda items: tuple(TokenSequence(tuple(map(_span, spans))) for spans in items),
            "messages": tuple,
            "tools": tuple,
            "rewrites": lambda items: tuple(_fill(Rewrite, item, {"messages": tuple}) for item in items),
            "error": _optional(lambda item: _fill(EpisodeError, item, {})),
        },
    )
