"""The world `openenv:URL`: environments on a server of OpenEnv."""

from __future__ import annotations

from functools import partial

from agentenv.core import UsageError
from agentenv.envs import EnvSpec, World

__all__ = ["WORLD"]


def _openenv(url: str) -> EnvSpec:
    """Return the specification of a server's environment, without connecting to the server."""
    from agentenv_openenv.adapter import OpenEnv
    from agentenv_openenv.tasks import tasks_of

    if not url.startswith(("http://", "https://")):
        raise UsageError(
            f"openenv:{url} has no server URL", remedy="write it as in openenv:http://127.0.0.1:8000"
        )
    name = "".join(char if char.isalnum() else "-" for char in url.partition("//")[2]).strip("-")
    return EnvSpec.of(
        f"openenv/{name}-v0",
        OpenEnv,
        kwargs={"source": url},
        tasks={kind: partial(tasks_of, url, kind) for kind in ("train", "test")},
        description=f"the OpenEnv environment at {url}",
    )


WORLD = World(_openenv, "URL", description="environments on a server of OpenEnv")
