"""Token sequences in a compact form for `trajectories.jsonl`: numbers as bytes instead of decimal digits.

Nearly all of a long episode are token ids and log-probabilities. Writing them as text takes several times as
long as all the rest of a line, and the log-probabilities take twice the room. A packed sequence is a JSON
object with the ids of all spans as 32-bit integers and the log-probabilities as 64-bit floats, both in
little-endian order and base64, so nothing is rounded. What is not such numbers stays unpacked. The experts
that an engine told are written in the same way, as one or two bytes for each.

A sequence with supports (`agentenv.core.supports`) has two more arrays in `supports`: the number of tokens in
the support of each sampled token, 0 for tokens of spans without supports, and the ids of all supports.
"""

from __future__ import annotations

import sys
from array import array
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice, repeat
from typing import Any

from agentenv.core.images import ImageTokens, images_between
from agentenv.core.routed_experts import RoutedExperts
from agentenv.core.supports import Supports
from agentenv.core.trajectory import TokenSequence, TokenSpan

__all__ = ["pack_images", "pack_routed", "pack_sequence", "unpack_routed", "unpack_sequence"]

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
    packed: dict[str, Any] = {"token_ids": ids, "logprobs": logprobs, "spans": spans}
    if any(span.supports is not None for span in sequence.spans):
        packed["supports"] = _pack_supports(sequence)
    if images := pack_images(sequence.images):
        packed["images"] = images
    if sequence.routed_experts is not None:
        packed |= pack_routed(sequence.routed_experts)
    return packed


def pack_images(images: Iterable[ImageTokens]) -> list[tuple[int, int, str]]:
    """Return images as their places, lengths and hashes; their files are in the messages."""
    return [(image.offset, image.length, image.sha256) for image in images]


def _pack_supports(sequence: TokenSequence) -> dict[str, str]:
    sampled = [span for span in sequence.spans if span.source == "model"]
    lengths = (span.supports.lengths if span.supports else repeat(0, len(span)) for span in sampled)
    kept = [span.supports.token_ids for span in sampled if span.supports is not None]
    return {
        "lengths": _pack(_IDS, list(chain.from_iterable(lengths))),
        "token_ids": _pack(_IDS, list(chain.from_iterable(kept))),
    }


def _unpack_supports(data: Mapping[str, str], sampled: int) -> Callable[[int], Supports | None]:
    """Return a function that returns the supports of the next sampled span of a length."""
    lengths, ids = _unpack(_IDS, data["lengths"]), _unpack(_IDS, data["token_ids"])
    if len(lengths) != sampled or sum(lengths) != len(ids):
        raise ValueError(f"{sampled} tokens are sampled, but {len(lengths)} have supports of {len(ids)} ids")
    next_lengths, next_ids = iter(lengths), iter(ids)

    def read(size: int) -> Supports | None:
        own = list(islice(next_lengths, size))
        return Supports.flat(islice(next_ids, sum(own)), own) if any(own) else None

    return read


def unpack_sequence(data: dict[str, Any]) -> TokenSequence:
    """Return the sequence of a packed JSON object.

    Raises:
        AlignmentError: The numbers break an invariant of a sequence.
        LookupError, TypeError, ValueError: The object is no packed sequence.
    """
    ids, logprobs = _unpack(_IDS, data["token_ids"]), _unpack(_LOGPROBS, data["logprobs"])
    supports_of = _unpack_supports(data["supports"], len(logprobs)) if "supports" in data else None
    images = [ImageTokens(*image) for image in data.get("images", ())]
    spans: list[TokenSpan] = []
    start = sampled = 0
    for source, length, turn, version in data["spans"]:
        own = supports = None
        if source == "model":
            own = logprobs[sampled : sampled + length]
            supports = None if supports_of is None else supports_of(length)
            sampled += length
        shown = images_between(images, start, start + length)
        spans.append(TokenSpan(source, ids[start : start + length], own, version, turn, supports, shown))
        start += length
    if sum(len(span.images) for span in spans) != len(images):
        raise ValueError("an image is outside its spans")
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
