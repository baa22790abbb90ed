"""The world `openenv:URL`: environments on a server of OpenEnv; it also serves ours to OpenEnv's clients."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from agentenv.core import UsageError
from agentenv.envs import EnvSpec, World, held_out_seeds, train_seeds

__all__ = ["WORLD"]


def _openenv(url: str) -> EnvSpec:
    """Return the specification of a server's environment, without connecting to the server."""
    from agentenv_openenv.adapter import OpenEnv

    if not url.startswith(("http://", "https://")):
        raise UsageError(
            f"openenv:{url} has no server URL", remedy="write it as in openenv:http://127.0.0.1:8000"
        )
    name = "".join(char if char.isalnum() else "-" for char in url.partition("//")[2]).strip("-")
    return EnvSpec.of(
        f"openenv/{name}-v0",
        OpenEnv,
        kwargs={"source": url},
        tasks={"train": train_seeds, "test": held_out_seeds},
        description=f"the OpenEnv environment at {url}",
    )


def _serve_forever(env: str, **options: Any) -> Awaitable[None]:
    from agentenv_openenv.server import serve_forever  # aiohttp is slow to import, and lists import this file

    return serve_forever(env, **options)


WORLD = World(
    _openenv, "URL", description="environments on a server of OpenEnv", serve_forever=_serve_forever
)
