"""Decide which requests a server of ours answers.

1. **Host**: the `Host` header must be an address at which the server listens. A web page can give its own
   host name the address 127.0.0.1 (DNS rebinding); its requests then carry that name and are refused.
2. **Origin**: browsers say in `Origin` which page sent a WebSocket or a POST. Only a page of this server may.
3. **Token**: whatever acts needs the server's token, so that neither another page nor another user of the
   machine can act. Tokens are compared in constant time.
4. **Content type**: a body must have the type that the server reads. A page may send `text/plain` and forms
   to any server without asking it first; it may not send JSON.
5. A server that other machines can reach must have a token.

The guard sees headers only and knows no web framework.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

from agentenv.core.errors import AgentEnvError, UsageError

__all__ = ["JSON_TYPES", "TOKEN_HEADERS", "Guard", "Refused", "new_token"]

JSON_TYPES = ("application/json",)
"""Content types of a JSON body."""
TOKEN_HEADERS = ("X-API-Key", "X-Access-Token", "E2B-Traffic-Access-Token")
"""Further headers in which clients, such as E2B's SDK, send a token."""
MIN_TOKEN_CHARS = 16
"""Shorter tokens are refused, because they can be guessed."""


class Refused(AgentEnvError):
    """A server does not answer a request.

    Args:
        status: the HTTP status of the answer, a 4xx.
        args: the message, which says what was wrong with the request.
        remedy: what the client has to change.
    """

    def __init__(self, status: int, *args: object, remedy: str = "") -> None:
        super().__init__(*args, remedy=remedy)
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild the error with its status, which `args` does not have."""
        return (type(self), (self.status, *self.args), {"remedy": self.remedy})


def new_token() -> str:
    """Return a new random token, which is safe in a header and in a URL."""
    return secrets.token_urlsafe(24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The rules of one server.

    Raises:
        UsageError: The server has no token and other machines can reach it, or the token is too short.
    """

    host: str = "127.0.0.1"
    """Address at which the server listens."""
    token: str = field(default_factory=new_token, repr=False)
    """Secret that clients send to act; empty if everyone who reaches the server may act."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names by which clients may reach the server, such as `host.docker.internal`."""

    def __post_init__(self) -> None:
        if not self.token and not _is_loopback(self.host):
            raise UsageError(
                f"other machines can reach a server at {self.host or 'all addresses'}, and it has no token",
                remedy="listen at 127.0.0.1, or leave the token on",
            )
        if self.token and (len(self.token) < MIN_TOKEN_CHARS or not _is_plain(self.token)):
            raise UsageError(
                f"the token must have at least {MIN_TOKEN_CHARS} visible ASCII characters and no spaces",
                remedy="leave it out to get a random one",
            )

    @classmethod
    def of(cls, host: str, token: str | None, allowed_hosts: Iterable[str] = ()) -> Self:
        """Return a guard with this token; None makes a new one, and an empty one lets everyone act.

        Raises:
            UsageError: The server would have no token and other machines could reach it.
        """
        return cls(
            host=host, token=new_token() if token is None else token, allowed_hosts=tuple(allowed_hosts)
        )

    def check_source(self, headers: Mapping[str, str]) -> None:
        """Check that the request was sent to this server, and not by a page of another one.

        Raises:
            Refused: The `Host` or the `Origin` header names another host.
        """
        host = headers.get("Host", "")
        if not self._answers_to(_host_name(host)):
            raise Refused(
                403,
                f"this server does not answer to the host {host!r:.100}",
                remedy="use the address at which it listens, or start it with --allow-host NAME",
            )
        origin = headers.get("Origin")
        if origin is not None and _origin_host(origin) != host.lower():
            raise Refused(403, f"this server answers no page of {origin!r:.100}")

    def check_token(self, headers: Mapping[str, str], *, query: str = "", others: Iterable[str] = ()) -> None:
        """Check that the request carries the server's token.

        The token is read from `Authorization: Bearer TOKEN` and from `TOKEN_HEADERS`.

        Args:
            headers: the request's headers.
            query: the token in the request's URL, where the server reads it from there.
            others: further tokens that this request may carry instead, such as that of one sandbox.

        Raises:
            Refused: The token is missing or wrong.
        """
        if not self.token:
            return
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        given = [*(headers.get(name, "") for name in TOKEN_HEADERS), query]
        given += [bearer.strip()] if scheme.lower() == "bearer" else []
        # Every pair is compared, so that the time tells nothing about which one was close.
        matches = [_same(known, sent) for known in (self.token, *others) for sent in given if sent]
        if not any(matches):
            wrong = "the token of this request is wrong" if any(given) else "this request has no token"
            raise Refused(401, wrong, remedy="send the token that the server printed, as a bearer token")

    def check_content_type(self, headers: Mapping[str, str], types: Iterable[str] = JSON_TYPES) -> None:
        """Check that a request with a body declares a type that the server reads.

        Raises:
            Refused: The body has another content type.
        """
        given = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        accepted = tuple(types)
        if given not in accepted:
            raise Refused(
                415,
                f"the body has the content type {given!r:.80}",
                remedy=f"send it as {' or '.join(accepted)}",
            )

    def _answers_to(self, name: str) -> bool:
        if name in {self.host.lower(), *(host.lower() for host in self.allowed_hosts)} and name:
            return True
        # The name in an address is what a page can rebind. A number cannot be, so a server for other machines
        # answers to every number.
        return _is_loopback(name) if _is_loopback(self.host) else _is_loopback(name) or _is_address(name)


def _same(known: str, sent: str) -> bool:
    return hmac.compare_digest(known.encode(), sent.encode("utf-8", errors="replace"))


def _is_plain(token: str) -> bool:
    return all("!" <= char <= "~" for char in token)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def _host_name(host: str) -> str:
    """Return the name in a `Host` header, without the port; empty if the header is not of this form."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _origin_host(origin: str) -> str:
    """Return host and port of a page's origin; empty if it has none, as in `null`."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return ""
    return parts.netloc.lower() if parts.scheme in {"http", "https"} else ""
