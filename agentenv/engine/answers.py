"""Read answers of servers, which may be of any length, and what they say is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp

from agentenv.core.errors import EngineError

__all__ = ["MAX_ANSWER_BYTES", "TooLong", "bounded", "message_of", "read_bounded"]

MAX_ANSWER_BYTES = 32_000_000
"""Most bytes of an answer in text, inflated; a reply of a million tokens has about 4 million."""
ERROR_KEYS = [
    "error",
    "errors",
    "message",
    "detail",
    "msg",
    "error_message",
    "choices",
    "content",
    "finish_reason",
]
"""Keys under which servers and gateways say what is wrong, also in a completion with an error's status."""
PAGE = re.compile(r"<(script|style)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
"""What a page of HTML has beside its words."""


class TooLong(EngineError):
    """An answer is longer than any that was asked for."""


async def bounded(content: aiohttp.StreamReader, most: int = MAX_ANSWER_BYTES) -> AsyncIterator[bytes]:
    """Yield the blocks of an answer.

    Raises:
        TooLong: It has more than `most` bytes.
    """
    size = 0
    async for block in content.iter_any():
        size += len(block)
        if size > most:
            raise TooLong(f"the answer has more than {most:,} bytes")
        yield block


async def read_bounded(reply: aiohttp.ClientResponse, most: int = MAX_ANSWER_BYTES) -> bytes:
    """Return a whole answer.

    Raises:
        TooLong: It has more than `most` bytes.
    """
    return b"".join([block async for block in bounded(reply.content, most)])


def message_of(answer: Any) -> str:
    """Return the error message in an answer, whatever its shape; empty if it holds none."""
    if isinstance(answer, str):
        if answer.lstrip()[:9].lower().startswith(("<!doctype", "<html")):
            answer = PAGE.sub(" ", answer)
        return " ".join(answer.split())
    if isinstance(answer, list):
        return "; ".join(filter(None, map(message_of, cast("list[Any]", answer)[:3])))
    if not isinstance(answer, dict):
        return ""
    fields = cast("dict[str, Any]", answer)
    for key in ERROR_KEYS:
        if said := message_of(fields.get(key)):
            place, upstream = fields.get("loc"), fields.get("metadata")
            if isinstance(place, list):
                return f"{'.'.join(map(str, cast('list[object]', place)))}: {said}"
            raw = cast("dict[str, Any]", upstream).get("raw") if isinstance(upstream, dict) else None
            return f"{said}: {raw}" if raw else said
    return json.dumps(fields) if fields else ""
