"""What one agent may ask of the processor, so that its requests hold up no other.

1. A request is bounded in its messages, parts and tools, each of which costs about 50 microseconds.
2. A session's requests are read and placed one after the other, beside the event loop where they are large.
3. A session that has used more processor time than its share waits until its share has grown again. Nothing
   is refused for that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from agentenv.core.threads import beside_loop
from agentenv.core.visible import logger
from agentenv.endpoint.request import Asked, NotAnswered

__all__ = ["Share", "check_bounds"]

MAX_MESSAGES = 10_000
MAX_PARTS = 10_000
MAX_TOOLS = 1_000
AT_ONCE_S = 10.0
"""Seconds of processor time that a session may use at once; a request of 80,000 tokens costs 3 ms."""
PART = 0.2
"""Part of a processor that a session may use in the long run."""
_log = logger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def check_bounds(asked: Asked) -> None:
    """Refuse a request without messages, and one with more of anything than an agent has.

    Raises:
        NotAnswered: It is refused.
    """
    if not asked.messages:
        raise NotAnswered(400, "invalid_request", "the request has no messages")
    contents = [message.get("content") for message in asked.messages]
    parts = sum(len(content) for content in contents if isinstance(content, list))
    calls = sum(len(message.get("tool_calls") or ()) for message in asked.messages)
    for count, most, what in (
        (len(asked.messages), MAX_MESSAGES, "messages"),
        (parts, MAX_PARTS, "parts of messages"),
        (calls, MAX_PARTS, "calls"),
        (len(asked.tools), MAX_TOOLS, "tools"),
    ):
        if count > most:
            told = f"the request has {count:,} {what}, and at most {most:,} are read"
            raise NotAnswered(413, "request_too_large", told)


class Share:
    """The work of one session.

    Args:
        name: name of the session in the log.
        clock: returns the time in seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._lock = asyncio.Lock()
        self._since = clock()
        self._used_s = 0.0

    async def run(self, size: int, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a function once no other of the session runs and the session has processor time left.

        Args:
            size: bytes that the function works on; 0 if it must not wait.
            function: the function.
            args: its arguments.
            kwargs: its arguments with names.
        """

        def measured() -> _T:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._used_s += time.thread_time() - began

        async with self._lock:
            if size and (wait_s := self.wait_s()) > 0:
                _log.warning("%s used %.0f s of processor time: its requests wait", self._name, self._used_s)
                await asyncio.sleep(wait_s)
            return await beside_loop(size, measured)

    def wait_s(self) -> float:
        """Return the seconds after which the session may use the processor again."""
        left_s = AT_ONCE_S + PART * (self._clock() - self._since) - self._used_s
        return max(0.0, -left_s / PART)
