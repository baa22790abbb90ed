"""Read answers of servers, which may be of any length."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp

from agentenv.core.errors import EngineError

__all__ = ["MAX_ANSWER_BYTES", "TooLong", "bounded", "read_bounded"]

MAX_ANSWER_BYTES = 32_000_000
"""Most bytes of an answer in text, inflated; a reply of a million tokens has about 4 million."""


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
