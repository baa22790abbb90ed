"""Model strings that name servers: their addresses, or a list of them that is read again during a run."""

from __future__ import annotations

from pathlib import Path

from agentenv.core.errors import EngineUnavailable, UsageError

__all__ = ["addresses", "is_listed", "names_servers"]

LISTED = "servers:"
"""What a model string begins with that names a list of servers."""
WEB = ("http://", "https://")
LIST_LIMIT_S = 10.0
"""Longest that a web server may take to send a list."""


def is_listed(model: str) -> bool:
    """Return whether a model string names a list of servers, which may change during a run."""
    return model.startswith(LISTED)


def names_servers(model: str) -> bool:
    """Return whether a model string names running servers."""
    return is_listed(model) or model.startswith(WEB)


def addresses(model: str) -> list[str]:
    """Return the addresses of the servers that a model string names, without `/v1`, each once.

    Args:
        model: addresses with commas between, or `servers:PLACE`, where the place is a file or an address of
            the web. It holds one address a line; what follows a `#` is a comment.

    Raises:
        EngineUnavailable: The list cannot be read now.
        UsageError: No server is named.
    """
    parts = _listed(model.removeprefix(LISTED)) if is_listed(model) else model.split(",")
    found = [part.strip().rstrip("/").removesuffix("/v1") for part in parts]
    if not any(found):
        raise UsageError(f"{model} names no server", remedy="write an address such as http://HOST:8000/v1")
    return list(dict.fromkeys(filter(None, found)))


def _listed(place: str) -> list[str]:
    from agentenv.engine.vllm.probe import Asker

    try:
        web = place.startswith(WEB)
        content = Asker(place, None, LIST_LIMIT_S).read("") if web else Path(place).read_bytes()
    except OSError as error:
        raise EngineUnavailable(f"the list of servers {place} cannot be read: {error.strerror}") from None
    return [line.partition("#")[0] for line in content.decode(errors="replace").splitlines()]
