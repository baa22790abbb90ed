"""Posts conversations to a chat API over HTTP, and tries again as OpenAI's own package does.

1. The statuses 408, 409, 429 and those from 500 on are tried again, and so are failed connections, unless
   the API says with `x-should-retry` what to do.
2. `Retry-After` is honoured up to `LONGEST_WAIT_S`; an API that asks for more is not waited for. Without it,
   each pause is twice as long as the one before.
3. A stream that has begun is not tried again.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from email.utils import mktime_tz, parsedate_tz
from http import HTTPStatus
from importlib import import_module
from random import SystemRandom
from time import time
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from multidict import CIMultiDict
from pydantic_core import from_json, to_json

from agentenv.engine.chat_answer import joined
from agentenv.engine.vllm.client import KEEP_ALIVE_S, message_of

__all__ = ["ChatClient", "ChatFailure", "Key"]

Key: TypeAlias = str | Callable[[], str | Awaitable[str]]
"""A key, or a function that returns the token that is valid now; the function may be async."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
LONGEST_WAIT_S = 120.0
AGAIN = {408, 409, 429}
"""Statuses below 500 after which a request is tried again."""
_random = SystemRandom()


class ChatFailure(Exception):
    """A chat API refused a request, broke off its answer, or could not be reached."""

    def __init__(
        self, message: str, *, status: int | None = None, body: object = None, reached: bool = True
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status_code = status
        """Status of the answer; None if there was none, or if a stream broke off."""
        self.body = body
        """The error in the answer, or the whole answer; None without an answer."""
        self.reached = reached
        """Whether the API answered at all."""
        said: Mapping[str, object] = cast("Any", body) if isinstance(body, Mapping) else {}
        self.code = said.get("code")
        self.param = said.get("param")
        self.type = said.get("type")

    @classmethod
    def of_status(cls, status: int, content: bytes) -> ChatFailure:
        """Return the failure that an answer with an error status stands for."""
        try:
            body: object = from_json(content)
        except ValueError:
            body = content.decode(errors="replace").strip()
        with suppress(ValueError):
            return cls(f"{status} {HTTPStatus(status).phrase}", status=status, body=_inner(body))
        return cls(f"status {status}", status=status, body=_inner(body))

    @classmethod
    def of_connection(cls, error: BaseException) -> ChatFailure:
        """Return the failure that a failed connection stands for."""
        silent = isinstance(error, TimeoutError)
        said = "the API did not answer in time" if silent else f"{type(error).__name__}: {error}"
        return cls(said, reached=False)


class ChatClient:
    """Posts to a chat API over connections of the current event loop.

    Args:
        address: address of the API, such as `https://api.openai.com/v1`; it may have a query, such as the
            version of the API.
        api_key: key that is sent as a bearer token; empty for none. A function is asked before each request.
        headers: further headers of each request; they win over those of this client.
        max_retries: how often a request is tried again.
        timeout_s: longest time in seconds in which nothing comes from the API.
    """

    def __init__(
        self, address: str, api_key: Key, *, headers: Mapping[str, str], max_retries: int, timeout_s: float
    ) -> None:
        place, mark, query = address.partition("?")
        self._url = f"{place.rstrip('/')}/chat/completions{mark}{query}"
        self._key = api_key
        self._max_retries = max_retries
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
            ValueError: The answer is not JSON.
        """
        data = _encoded({**body, "stream": True} if stream else body)
        headers = await self._authorization()
        for attempt in range(self._max_retries + 1):
            try:
                async with self._http.post(self._url, data=data, headers=headers, proxy=self._proxy) as reply:
                    if reply.status < 400 and stream:
                        return await joined(_chunks(reply.content))
                    content = await reply.read()
                    if reply.status < 400:
                        return from_json(content)
                    failure = ChatFailure.of_status(reply.status, content)
                    pause = _pause(reply.headers, reply.status, attempt)
            except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
                failure, pause = ChatFailure.of_connection(error), _backoff(attempt)
            if pause is None or attempt == self._max_retries:
                raise failure
            await asyncio.sleep(pause)
        raise AssertionError("a request is sent at least once")

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


async def _chunks(content: aiohttp.StreamReader) -> AsyncIterator[Any]:
    """Yield the JSON of each event of a stream.

    Raises:
        ChatFailure: An event says that the API failed, or the connection broke.
    """
    async with aclosing(_events(content)) as events:
        async for data in events:
            if data.startswith(b"[DONE]"):
                return
            chunk: Any = from_json(data)
            if isinstance(chunk, dict) and (error := cast("dict[str, Any]", chunk).get("error")):
                words = message_of({"error": error}) or "An error occurred during streaming"
                raise ChatFailure(words, body=error)
            yield chunk


async def _events(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Yield the data of each server-sent event."""
    data: list[bytes] = []
    rest = b""
    try:
        async for block in content.iter_any():
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    data.append(line[5:].strip())
                elif not line.strip() and data:
                    yield b"\n".join(data)
                    data.clear()
    except (aiohttp.ClientError, OSError) as error:
        # The answer has begun, so trying again is not for this client to decide.
        raise ChatFailure.of_connection(error) from error
    if rest.startswith(b"data:"):
        data.append(rest[5:].strip())
    if data:
        yield b"\n".join(data)


def _pause(headers: Mapping[str, str], status: int, attempt: int) -> float | None:
    """Return the seconds to wait before the request is tried again; None if it is not."""
    asked = _asked_wait(headers)
    if asked is not None and asked > LONGEST_WAIT_S:
        return None
    said = headers.get("x-should-retry")
    if said == "false" or (said != "true" and status not in AGAIN and status < 500):
        return None
    return asked if asked is not None and asked > 0 else _backoff(attempt)


def _backoff(attempt: int) -> float:
    # The requests of a run fail together, so without a random part they would come back together.
    return min(FIRST_PAUSE_S * 2.0 ** min(attempt, 32), LONGEST_PAUSE_S) * _random.uniform(0.75, 1)


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


def _inner(body: object) -> object:
    """Return the error in the body of an answer, or the body if it has none."""
    return cast("Mapping[str, object]", body).get("error", body) if isinstance(body, Mapping) else body


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
