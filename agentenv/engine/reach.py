"""Whether anything answers at an address, asked once before anything else."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from agentenv.core.errors import EngineUnavailable, UsageError

__all__ = ["check_answers", "require_no_password"]

ANSWERS_WITHIN_S = 5.0


def check_answers(name: str, url: str) -> None:
    """Ask a server once for anything, because what asks it later tries for minutes.

    Args:
        name: what the server is for, for the message.
        url: its address. What does not begin with `http`, or is reached through a proxy, is not asked, and
            nothing is asked on an event loop: the server may be another task of it.

    Raises:
        EngineUnavailable: Nothing answers within 5 s; any answer will do.
        UsageError: The address holds a password.
    """
    require_no_password(url)
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return
    parts = urlsplit(url)
    proxied = parts.scheme in getproxies() and not proxy_bypass(parts.netloc)
    if parts.scheme not in ("http", "https") or proxied:
        return
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    problem = _within(ANSWERS_WITHIN_S, lambda: _ask(kind(parts.hostname or "", parts.port)))
    if problem is not None:
        raise EngineUnavailable(
            f"{name} does not answer: {problem}",
            remedy="check the address, or start a server with `agentenv serve MODEL`",
        )


def _ask(connection: HTTPConnection) -> str | None:
    """Send one request; return what is wrong, and None once there is an answer."""
    connection.timeout = ANSWERS_WITHIN_S
    try:
        with suppress(HTTPException, ssl.SSLError), closing(connection):
            connection.request("GET", "/")
            connection.getresponse()
    except OSError as error:
        return str(error.strerror or error)
    return None


def _within(limit_s: float, ask: Callable[[], str | None]) -> str | None:
    """Return what `ask` returns, which is given up after so many seconds: a name server may hang, too."""
    said = [f"timed out after {limit_s:g} s"]
    thread = Thread(target=lambda: said.append(ask() or ""), daemon=True)
    thread.start()
    thread.join(limit_s)
    return said[-1] or None


def require_no_password(address: str) -> None:
    """Refuse the address of a model that holds a password.

    Addresses are names of engines, so they stand in records, in log lines and on pages.

    Raises:
        UsageError: The address has a part before an @.
    """
    if "@" in urlsplit(address).netloc:
        raise UsageError(
            "an address of a model must hold no name and no password, because records name it",
            remedy="pass the key as engine.api_key, or in the environment: OPENAI_API_KEY, VLLM_API_KEY",
        )
