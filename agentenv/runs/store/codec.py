"""Convert trajectories to JSON and back without loss.

The conversion is written by hand, because token arrays are large and the set of types is small and fixed.
Unknown keys are ignored and missing keys take their default, so that older and newer files can be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import StrEnum
from functools import cache
from hashlib import blake2b
from typing import Any, cast

from pydantic_core import from_json, to_json

from agentenv.core.episode_env import TaskFields
from agentenv.core.images import ImageTokens
from agentenv.core.messages import CallStatus, ToolCall, ToolErrorKind, ToolResult
from agentenv.core.supports import Supports
from agentenv.core.trajectory import (
    EpisodeError,
    Rewrite,
    StopReason,
    TokenSequence,
    TokenSpan,
    Trajectory,
    Turn,
)
from agentenv.runs.store.images import with_files
from agentenv.runs.store.packed import pack_images, pack_routed, pack_sequence, unpack_routed, unpack_sequence

__all__ = ["decode_trajectory", "digest_of", "dumps", "encode_line", "encode_trajectory", "loads"]

_Json = dict[str, Any]
_PLAIN = frozenset({str, int, float, bool, type(None)})
"""Types that JSON has, without those that hold others."""
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


def _lean(value: Any, *, skip: frozenset[str] = frozenset(), typed: bool = True) -> _Json:
    """Return the fields of a flat dataclass that differ from their defaults; `typed` compares types, too."""
    out: _Json = {}
    for name, default in _defaults(type(value)):
        if name in skip:
            continue
        item = getattr(value, name)
        # The types are compared too: 1 == 1.0 == True, but each must be read back as what it was.
        empty = isinstance(item, (Mapping, tuple, list)) and not item and not default
        same = type(item) is type(default) if typed else empty or item == default
        if not same or (typed and item != default):
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
    """Return the line of a trajectory in `trajectories.jsonl`, with its line break.

    It is the JSON of `encode_trajectory`, but token ids and log-probabilities are packed, and a message that
    is also in the turns is only a number: its place among the messages of all turns.
    """
    out = _encode_without_tokens(trajectory)
    if "messages" in out:
        out["messages"] = _refer(trajectory.messages, trajectory.turns)
    sequences = _packed(trajectory)
    out["digest"] = trajectory.digest or _digest(trajectory, sequences)
    return b'%b,"sequences":%b}\n' % (_quick_json(out)[:-1], sequences)


def digest_of(trajectory: Trajectory) -> str:
    """Return the digest of a record: of all that a run stores of it."""
    return _digest(trajectory, _packed(trajectory))


def _packed(trajectory: Trajectory) -> bytes:
    return _quick_json([pack_sequence(sequence) or _spans(sequence) for sequence in trajectory.sequences])


def _digest(trajectory: Trajectory, sequences: bytes) -> str:
    # A record that was read must have the digest of the one that was written, whose values may have other
    # types, such as numbers of NumPy. So types are not compared, and everything becomes plain JSON.
    text = dumps(_encode_without_tokens(trajectory, typed=False))
    return blake2b(sequences, digest_size=12, key=blake2b(text.encode()).digest()).hexdigest()


def _refer(messages: Sequence[Mapping[str, object]], turns: Sequence[Turn]) -> list[object]:
    """Return the messages with numbers for those that the turns have too, in the same order."""
    said = [
        message
        for turn in turns
        for message in (turn.message, *(one.to_message() for one in turn.tool_results))
    ]
    referred: list[object] = []
    place = 0
    for message in messages:
        known = place < len(said) and message == said[place] and list(message) == list(said[place])
        referred.append(place if known else message)
        place += known
    return referred


def _resolve(data: _Json) -> _Json:
    """Return the JSON object of a line with all messages written out."""
    messages: list[Any] = data.get("messages", [])
    if not any(type(message) is int for message in messages):
        return data
    said: list[Any] = []
    for turn in data["turns"]:
        said.append(turn["message"])
        said += [
            {"role": "tool"} | {name: result[name] for name in ("tool_call_id", "name", "content")}
            for result in turn.get("tool_results", ())
        ]
    if min((message for message in messages if type(message) is int), default=0) < 0:
        raise ValueError("a message refers to a place below 0")
    whole = [said[message] if type(message) is int else message for message in messages]
    return data | {"messages": whole}


def _quick_json(value: object) -> bytes:
    """Return what `dumps` returns, as bytes; long texts are written four times as fast."""
    # The faster writer writes values without a JSON type in another way, and not in ASCII.
    with suppress(ValueError, RecursionError):
        if _is_plain(value) and (line := to_json(value)).isascii():
            return line
    return dumps(value).encode()


def _is_plain(value: object) -> bool:
    """Return whether a value has JSON types only, as nearly all records have."""
    kind = type(value)
    if kind is dict or kind is TaskFields:
        items = cast("dict[object, object]", value).items()
        return all(type(key) is str and (type(item) in _PLAIN or _is_plain(item)) for key, item in items)
    if kind is list or kind is tuple:
        return all(type(item) in _PLAIN or _is_plain(item) for item in cast("Sequence[object]", value))
    return kind in _PLAIN or isinstance(value, StrEnum)


def encode_trajectory(trajectory: Trajectory) -> _Json:
    """Return a trajectory as plain JSON values; fields with their default value are left out."""
    out = _encode_without_tokens(trajectory)
    out["sequences"] = [_spans(sequence) for sequence in trajectory.sequences]
    return out


def _spans(sequence: TokenSequence) -> list[_Json] | _Json:
    spans = [_encode_span(span) for span in sequence.spans]
    routed = sequence.routed_experts
    return spans if routed is None else {"unpacked": spans, **pack_routed(routed)}


def _encode_span(span: TokenSpan) -> _Json:
    out = _lean(span, skip=frozenset({"supports", "images"}))
    if span.images:
        out["images"] = pack_images(span.images)
    if span.supports is not None:
        out["supports"] = {
            "token_ids": span.supports.token_ids.tolist(),
            "lengths": span.supports.lengths.tolist(),
        }
    return out


def _encode_without_tokens(trajectory: Trajectory, *, typed: bool = True) -> _Json:
    skip = frozenset({"turns", "sequences", "rewrites", "other_seats", "digest"})
    out = _lean(trajectory, skip=skip, typed=typed)
    if trajectory.error is not None:
        out["error"] = _lean(trajectory.error, typed=typed)
    if trajectory.rewrites:
        out["rewrites"] = [_lean(rewrite, typed=typed) for rewrite in trajectory.rewrites]
    out["turns"] = [_encode_turn(turn, typed=typed) for turn in trajectory.turns]
    return out


def _encode_turn(turn: Turn, *, typed: bool) -> _Json:
    out = _lean(turn, skip=frozenset({"tool_calls", "tool_results"}), typed=typed)
    if turn.tool_calls:
        skip = frozenset({"values"})
        out["tool_calls"] = [_lean(call, skip=skip, typed=typed) for call in turn.tool_calls]
    if turn.tool_results:
        out["tool_results"] = [_lean(result, typed=typed) for result in turn.tool_results]
    return out


def _optional(kind: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda value: None if value is None else kind(value)


def _span(data: _Json) -> TokenSpan:
    kinds: dict[str, Callable[[Any], object]] = {
        "token_ids": tuple,
        "logprobs": _optional(tuple),
        "supports": _optional(_supports),
        "images": lambda images: tuple(ImageTokens(*image) for image in images),
    }
    return _fill(TokenSpan, data, kinds)


def _supports(data: _Json) -> Supports:
    return Supports.flat(data["token_ids"], data["lengths"])


def _sequence(data: Any) -> TokenSequence:
    if not isinstance(data, dict):
        return TokenSequence(tuple(map(_span, data)))
    packed = cast("_Json", data)
    if "unpacked" not in packed:
        return unpack_sequence(packed)
    return TokenSequence(tuple(map(_span, packed["unpacked"])), unpack_routed(packed))


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
        return with_files(_decode(data))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"it does not describe an episode: {type(error).__name__}: {error}") from error


def _decode(data: _Json) -> Trajectory:
    return _fill(
        Trajectory,
        _resolve(data),
        {
            "stop_reason": StopReason,
            "turns": lambda items: tuple(map(_turn, items)),
            "sequences": lambda items: tuple(map(_sequence, items)),
            "messages": tuple,
            "tools": tuple,
            "rewrites": lambda items: tuple(
                _fill(Rewrite, item, {"messages": tuple, "tools": _optional(tuple)}) for item in items
            ),
            "error": _optional(lambda item: _fill(EpisodeError, item, {})),
        },
    )
