"""Whether a reply was used later, such as a plan by whose steps other requests work.

A line of the reply that its own request did not contain, and that a later one does, was taken over. Short
lines prove nothing, so they are not compared. Lines of JSON end at quotation marks too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from agentenv.core.messages import Message, text_of

__all__ = ["is_used_in"]

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
