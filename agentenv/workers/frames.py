"""Messages between the driver and a local worker: pickled tuples, each after its length.

Both ends are processes of this library on one machine, connected by a socket that has no name, so nobody
else can write to it.
"""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

from agentenv.core.errors import UsageError

__all__ = ["pickled", "read_frame", "write_frame"]

_HEAD = 8
"""Number of bytes of the length."""


def pickled(message: tuple[object, ...]) -> bytes:
    """Return the bytes of a message.

    Raises:
        UsageError: A part of the message cannot be pickled.
    """
    try:
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise UsageError(
            f"this cannot be sent between processes: {type(error).__name__}: {error}",
            remedy="let tasks and results consist of plain values",
        ) from error
    return len(body).to_bytes(_HEAD, "big") + body


def write_frame(writer: asyncio.StreamWriter, *message: object) -> None:
    """Write a message; the caller need not wait until it has left."""
    writer.write(pickled(message))


async def read_frame(reader: asyncio.StreamReader) -> tuple[Any, ...] | None:
    """Return the next message; None if the other process closed the connection or ended."""
    try:
        length = int.from_bytes(await reader.readexactly(_HEAD), "big")
        return pickle.loads(await reader.readexactly(length))  # noqa: S301 - written by our own process
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
