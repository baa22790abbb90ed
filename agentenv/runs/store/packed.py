"""Token sequences in a compact form for `trajectories.jsonl`: numbers as bytes instead of decimal digits.

Nearly all of a long episode are token ids and log-probabilities. Writing them as text takes several times as
long as all the rest of a line, and the log-probabilities take twice the room. A packed sequence is a JSON
object with the ids of all spans as 32-bit integers and the log-probabilities as 64-bit floats, both in
little-endian order and base64, so nothing is rounded. What is not such numbers stays unpacked. The experts
that an engine told are written in the same way, as one or two bytes for each.
"""

from __future__ import annotations

import sys
from array import array
from binascii import a2b_base64, b2a_base64
from collections.abc import Sequence
from itertools import chain
from typing import Any

from agentenv.core.routed_experts import RoutedExperts
from agentenv.core.trajectory import TokenSequence, TokenSpan

__all__ = ["pack_routed", "pack_sequence", "unpack_routed", "unpack_sequence"]

_IDS, _LOGPROBS = "I", "d"
"""Type codes of `array`: 32-bit unsigned integers and 64-bit floats."""
_ROUTED = ("layers", "choices", "width")


def pack_sequence(sequence: TokenSequence) -> dict[str, Any] | None:
    """Return a sequence as a JSON object; None if it has numbers that the packed form would change."""
    try:
        ids = _pack(_IDS, sequence.token_ids)
        logprobs = _pack(_LOGPROBS, list(chain.from_iterable(span.logprobs or () for span in sequence.spans)))
    except (OverflowError, TypeError):
        return None
    # One row for each span; it has as many logprobs as tokens exactly if the source is the model.
    spans = [(span.source, len(span), span.turn, span.weights_version) for span in sequence.spans]
    packed = {"token_ids": ids, "logprobs": logprobs, "spans": spans}
    return packed if sequence.routed_experts is None else packed | pack_routed(sequence.routed_experts)


def unpack_sequence(data: dict[str, Any]) -> TokenSequence:
    """Return the sequence of a packed JSON object.

    Raises:
        AlignmentError: The numbers break an invariant of a sequence.
        LookupError, TypeError, ValueError: The object is no packed sequence.
    """
    ids, logprobs = _unpack(_IDS, data["token_ids"]), _unpack(_LOGPROBS, data["logprobs"])
    spans: list[TokenSpan] = []
    start = sampled = 0
    for source, length, turn, version in data["spans"]:
        own = None
        if source == "model":
            own = logprobs[sampled : sampled + length]
            sampled += length
        spans.append(TokenSpan(source, ids[start : start + length], own, version, turn))
        start += length
    if (start, sampled) != (len(ids), len(logprobs)) or len(ids) != sum(map(len, spans)):
        raise ValueError(f"its spans have {start} tokens, {sampled} of them sampled, but its arrays do not")
    return TokenSequence(tuple(spans), unpack_routed(data))


def pack_routed(routed: RoutedExperts) -> dict[str, Any]:
    """Return the experts of a sequence as a part of its JSON object."""
    ids = b2a_base64(routed.data, newline=False).decode()
    return {"routed_experts": {"ids": ids, **{name: getattr(routed, name) for name in _ROUTED}}}


def unpack_routed(data: dict[str, Any]) -> RoutedExperts | None:
    """Return the experts in the JSON object of a sequence; None if it has none.

    Raises:
        AlignmentError, LookupError, TypeError, ValueError: The object has something else in their place.
    """
    routed = data.get("routed_experts")
    if routed is None:
        return None
    return RoutedExperts(a2b_base64(routed["ids"], strict_mode=True), *(routed[name] for name in _ROUTED))


def _pack(code: str, numbers: Sequence[float]) -> str:
    packed = array(code, numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return b2a_base64(packed, newline=False).decode()


def _unpack(code: str, text: str) -> tuple[Any, ...]:
    packed = array(code)
    packed.frombytes(a2b_base64(text, strict_mode=True))
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)
