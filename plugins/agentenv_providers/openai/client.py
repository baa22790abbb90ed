"""Posts conversations to a chat API over HTTP, and tries again until nothing comes of it any more.

1. The statuses 408, 409, 429 and those from 500 on are tried again, and so are failed connections, unless
   the API says with `x-should-retry` what to do. A quota of days is not waited for.
2. `Retry-After` is honoured, with a random part that keeps a crowd from coming back together. Without it,
   each pause is twice as long as the one before.
3. A request is given up when it has been tried for `retry_s`. At a limit of rate these seconds begin anew
   with each answer that any request gets: a crowd waits for its turn, however long that takes.
4. A stream that has begun is not tried again.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from email.utils import mktime_tz, parsedate_tz
from importlib import import_module
from itertools import count
from random import SystemRandom
from time import monotonic, time
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from multidict import CIMultiDict
from pydantic_core import from_json, to_json

from agentenv.core import logger
from agentenv.engine import TooLong, bounded, message_of, read_bounded
from agentenv_providers.openai.errors import ChatFailure, spent
from agentenv_providers.openai.reply import Unreadable
from agentenv_providers.openai.stream import joined

__all__ = ["ChatClient", "Key", "Pace", "Patience"]

log = logger(__name__)

Key: TypeAlias = str | Callable[[], str | Awaitable[str]]
"""A key, or a function that returns the token that is valid now; the function may be async."""

KEEP_ALIVE_S = 4.0
"""Less than the 5 s after which vLLM closes an idle connection, so that we never use a closed one."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
TOO_MANY = 429
AGAIN = {408, 409, TOO_MANY}
"""Statuses below 500 after which a request is tried again."""
_random = SystemRandom()


class Pace:
    """Spaces what is taken evenly over time; nobody waits without a limit.

    Args:
        per_minute: how much may be taken in a minute; None for no limit.
    """

    def __init__(self, per_minute: float | None) -> None:
        self._each_s = 60 / per_minute if per_minute else 0.0
        self._free = 0.0
        """Time at which the next may begin, by `time.monotonic()`."""

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self._each_s > 0

    async def take(self, amount: float = 1) -> None:
        """Wait for a turn, and take an amount of which the rest of a minute is left to others."""
        if not self._each_s:
            return
        now = monotonic()
        begins = max(now, self._free)
        self._free = begins + amount * self._each_s
        await asyncio.sleep(begins - now)

    def correct(self, amount: float) -> None:
        """Take more, or give back what is negative, once the true amount is known."""
        self._free += amount * self._each_s


class Patience:
    """Decides for how long failed requests are tried again.

    Args:
        retry_s: seconds after which a request is given up. At a limit of rate they begin anew with each
            answer that any request gets: a crowd waits for its turn, however long that takes.
    """

    def __init__(self, retry_s: float) -> None:
        self.retry_s = retry_s
        self._answered = 0.0

    def answered(self) -> None:
        """Note that a request got its answer."""
        self._answered = monotonic()

    def pause(self, began: float, attempt: int, *, rate: bool, asked: float | None) -> float | None:
        """Return the seconds to wait before a request is tried again; None if it is given up.

        Args:
            began: time at which it was sent first, by `time.monotonic()`.
            attempt: how often it was tried again before.
            rate: whether it was over a limit of rate.
            asked: seconds for which the API asks to be left alone; None if it does not say.
        """
        # The requests of a run fail together, so without a random part they would come back together.
        grown = min(FIRST_PAUSE_S * 2.0 ** min(attempt, 32), LONGEST_PAUSE_S) * _random.uniform(0.75, 1)
        pause = max(asked or 0.0, 0.0) + grown
        since = max(began, self._answered) if rate else began
        return pause if monotonic() + pause <= since + self.retry_s else None


class ChatClient:
    """Posts to a chat API over connections of the current event loop.

    Args:
        address: address of the API, such as `https://api.openai.com/v1`; it may have a query, such as the
            version of the API.
        api_key: key that is sent as a bearer token; empty for none. A function is asked before each request.
        headers: further headers of each request; they win over those of this client.
        retry_s: seconds for which a request is tried again.
        timeout_s: longest time in seconds in which nothing comes from the API.
    """

    def __init__(
        self, address: str, api_key: Key, *, headers: Mapping[str, str], retry_s: float, timeout_s: float
    ) -> None:
        place, mark, query = address.partition("?")
        self._url = f"{place.rstrip('/')}/chat/completions{mark}{query}"
        self._key = api_key
        self._patience = Patience(retry_s)
        self._told = False
        secure = _ssl_context() if address.startswith("https") else True
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=secure),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s),
            headers=_headers(headers),
        )
        # Not `trust_env`, which looks for the proxy at each request anew, in a thread, and refuses our key
        # where `.netrc` has another one.
        self._proxy = _proxy_for(address)

    async def send(self, body: Mapping[str, Any], *, stream: bool) -> Any:
        """Post a request, and return the JSON of the answer; a streamed answer is joined.

        Raises:
            ChatFailure: The API refused the request, or could not be reached.
            EOFError: The stream ended in the middle of the answer.
            Unreadable: The answer is no chat completion.
        """
        data = _encoded({**body, "stream": True} if stream else body)
        headers, began = await self._authorization(), monotonic()
        for attempt in count():
            try:
                async with self._http.post(self._url, data=data, headers=headers, proxy=self._proxy) as reply:
                    if reply.status < 400:
                        answer = await _read(reply, stream=stream)
                        # Some proxies answer with status 200 and the error of the server behind them.
                        said = cast("Mapping[str, Any]", answer if isinstance(answer, Mapping) else {})
                        if said.get("choices") or not (inside := said.get("error")):
                            self._patience.answered()
                            return answer
                        failure = ChatFailure("the answer is an error", body=inside)
                    else:
                        failure = ChatFailure.of_status(reply.status, await _error_of(reply))
                    again = self._may_try_again(reply.headers, failure)
            except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
                failure, again = ChatFailure.of_connection(error), True
            rate = failure.status_code == TOO_MANY
            pause = self._patience.pause(began, attempt, rate=rate, asked=failure.wait_s)
            if pause is None or not again:
                raise failure
            if attempt and not self._told:
                self._told = True
                log.warning("%s; the request is sent again, for up to %g s", failure, self._patience.retry_s)
            await asyncio.sleep(pause)
        raise AssertionError("a request is sent at least once")

    def _may_try_again(self, headers: Mapping[str, str], failure: ChatFailure) -> bool:
        """Return whether a request may be sent again; notes the seconds for which the API asks to wait."""
        if (asked := _asked_wait(headers)) is not None:
            failure.wait_s = asked
        status, told = failure.status_code or 0, headers.get("x-should-retry")
        failure.lasting = status == TOO_MANY and (failure.wait_s or 0.0) > self._patience.retry_s
        if spent(failure) or told == "false":
            return False
        return told == "true" or status in AGAIN or status >= 500

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _authorization(self) -> dict[str, str]:
        key = self._key
        if not isinstance(key, str):
            try:
                # A function that is not async may ask the network for a new token.
                given = await asyncio.to_thread(key)
                key = await given if inspect.isawaitable(given) else given
            except Exception as error:
                raise ChatFailure(
                    f"there is no key: {type(error).__name__}: {error}", reached=False
                ) from error
        own = "Authorization" in self._http.headers
        return {"Authorization": f"Bearer {key}"} if key and not own else {}


async def _error_of(reply: aiohttp.ClientResponse) -> bytes:
    try:
        return await read_bounded(reply)
    except TooLong as error:
        return str(error).encode()


async def _read(reply: aiohttp.ClientResponse, *, stream: bool) -> Any:
    """Return the JSON of an answer, which need not be streamed if that was asked for, nor whole if not."""
    kind = reply.content_type
    if "event-stream" in kind or (stream and not re.search("json|html", kind)):
        return await joined(_chunks(reply.content))
    try:
        content = await read_bounded(reply)
    except TooLong as error:
        raise Unreadable(str(error)) from error
    try:
        return _decoded(content)
    except ValueError:
        words = message_of(content.decode(errors="replace"))
        raise Unreadable(f"the answer is no JSON: {words[:200] or 'it is empty'}") from None


def _decoded(data: bytes) -> Any:
    try:
        return from_json(data)
    except ValueError as error:
        try:
            return json.loads(data)  # which also takes half of a surrogate pair, where an answer was cut
        except RecursionError:
            raise error from None


async def _chunks(content: aiohttp.StreamReader) -> AsyncIterator[Any]:
    """Yield the JSON of each event of a stream.

    Raises:
        ChatFailure: An event says that the API failed, or the connection broke.
    """
    async with aclosing(_events(content)) as events:
        async for data in events:
            if data.startswith(b"[DONE]"):
                return
            chunk: Any = _decoded(data)
            if isinstance(chunk, dict) and (error := cast("dict[str, Any]", chunk).get("error")):
                words = message_of({"error": error}) or "An error occurred during streaming"
                raise ChatFailure(words, body=error)
            yield chunk


async def _events(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Yield the data of each server-sent event."""
    data: list[bytes] = []
    begun: list[bytes] = []
    try:
        async for block in bounded(content):
            *lines, rest = block.split(b"\n")
            if lines:
                lines[0] = b"".join([*begun, lines[0]])
                begun.clear()
            begun.append(rest)
            for line in lines:
                if line.startswith(b"data:"):
                    data.append(line[5:].strip())
                elif not line.strip() and data:
                    yield b"\n".join(data)
                    data.clear()
    except TooLong as error:
        raise Unreadable(str(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        # The answer has begun, so trying again is not for this client to decide.
        raise ChatFailure.of_connection(error) from error
    if (rest := b"".join(begun)).startswith(b"data:"):
        data.append(rest[5:].strip())
    if data:
        yield b"\n".join(data)


def _asked_wait(headers: Mapping[str, str]) -> float | None:
    """Return the seconds for which an API asks to be left alone."""
    for name, divisor in (("retry-after-ms", 1000), ("retry-after", 1)):
        with suppress(ValueError):
            wait = float(headers.get(name, "")) / divisor
            return wait if wait == wait else None  # noqa: PLR0124 - not a number differs from itself
    date = parsedate_tz(headers.get("retry-after", ""))
    return None if date is None else mktime_tz(date) - time()


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return to_json(body)
    except ValueError:
        # Text with a lone surrogate is not UTF-8, but JSON can write it as an escape.
        return json.dumps(body).encode()


def _headers(further: Mapping[str, str]) -> CIMultiDict[str]:
    headers = CIMultiDict({"Content-Type": "application/json", "Accept": "application/json"})
    for header, variable in (
        ("OpenAI-Organization", "OPENAI_ORG_ID"),
        ("OpenAI-Project", "OPENAI_PROJECT_ID"),
    ):
        if value := os.environ.get(variable):
            headers[header] = value
    headers.update(further)
    return headers


def _proxy_for(address: str) -> str | None:
    """Return the proxy that the environment (`HTTPS_PROXY`, `NO_PROXY` and so on) names for an address."""
    parts = urlsplit(address)
    if parts.hostname is None or proxy_bypass(parts.hostname):
        return None
    return getproxies().get(parts.scheme)


def _ssl_context() -> ssl.SSLContext:
    """Return a context that trusts the system's certificates, and those of certifi where it is installed."""
    context = ssl.create_default_context()
    with suppress(ImportError):
        context.load_verify_locations(import_module("certifi").where())
    return context
