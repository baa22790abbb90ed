"""Stop strings: texts of `Sampling.stop` that end a completion.

A completion ends with the token that completes a stop string in the text of the sampled tokens. That token is
kept as it was sampled, even if its text goes on after the stop string, because a part of a token cannot be
trained on. The text shows control tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

__all__ = ["Decoder", "cut_at_stop", "faulty_stop", "stop_finder"]

UNFINISHED = "\ufffd"
"""What a decoder writes for the first bytes of a character whose other bytes are in the next tokens."""
SPARE_TOKENS = 8
"""Tokens decoded before those that a stop string can take, because the first ones may be decoded wrongly."""


class Decoder(Protocol):
    """The part of a tokenizer that finds stop strings."""

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of ids, which shows control tokens."""
        ...


def stop_finder(stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> Callable[[list[int]], bool]:
    """Return a function that says whether the last token completed a stop string.

    It decodes only the last tokens, as many as a stop string can take: each token has at least one byte.
    """
    window = max(len(text.encode()) for text in stop) + SPARE_TOKENS

    def found(tokens: list[int]) -> bool:
        text = decode(tokens[-window:])
        return any(string in text for string in stop)

    return found


def cut_at_stop(
    tokens: Sequence[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> tuple[list[int], bool]:
    """Return the tokens up to the one that completes a stop string, and whether there is one."""
    whole = list(tokens)
    if stop and any(string in decode(whole) for string in stop):
        found = stop_finder(stop, decode)
        for size in range(1, len(whole) + 1):
            if found(whole[:size]):
                return whole[:size], True
    return whole, False


def faulty_stop(
    tokens: Sequence[int],
    reason: str,
    *,
    ends: Collection[int],
    stop: Sequence[str],
    decode: Callable[[Sequence[int]], str],
) -> str:
    """Return what is wrong with the end of a completion that stop strings may end; empty if nothing is.

    Args:
        tokens: the sampled tokens.
        reason: the finish reason.
        ends: the stop tokens of the request.
        stop: the stop strings of the request.
        decode: returns the text of ids.
    """
    before = decode(tokens[:-1])
    early = next((string for string in stop if string in before), None)
    # The engine may wait for the rest of a character before it looks for stop strings.
    if early is not None and not before.endswith(UNFINISHED):
        return f"tokens after the stop string {early!r}"
    if reason != "stop" or tokens[-1] in ends:
        return ""
    text = decode(tokens)
    if any(string in text for string in stop):
        return ""
    return f"the finish reason 'stop', but the text ends with {text[-40:]!r} and has no stop string"
