"""The tasks of a server of OpenEnv: those of its task API, or seeds if its environment has none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from itertools import count
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from agentenv.core import ServerUnavailable, TaskError

__all__ = ["tasks_of"]

_TIMEOUT_S = 30.0
_NO_TASKS = HTTPStatus.NOT_IMPLEMENTED
"""Status with which OpenEnv answers for an environment without tasks."""
_MOST_TASKS, _MOST_BYTES = 1_000_000, 16 << 20
"""More of these is taken for no answer."""


def tasks_of(url: str, kind: str) -> Iterable[Mapping[str, object]]:
    """Return the tasks of a server's splits of a kind; where it has no tasks, even or odd seeds without end.

    Args:
        url: address of the server.
        kind: `train` or `test`, which is `validation` where the server has no split of the type `test`.

    Raises:
        ServerUnavailable: The server does not answer.
        TaskError: The server has tasks, but none of this kind.
    """
    try:
        name = quote(_asked(url, "/list_environments")[0])
        splits: Any = _asked(url, f"/{name}/splits")
        kinds = {str(split["type"]) for split in splits}
        wanted = "validation" if kind == "test" and "test" not in kinds else kind
        sizes = {
            split["name"]: _asked(url, f"/{name}/num_tasks", {"split": split["name"]})["num_tasks"]
            for split in splits
            if split["type"] == wanted
        }
    except (HTTPError, LookupError, TypeError) as error:
        if (code := getattr(error, "code", 0)) >= HTTPStatus.INTERNAL_SERVER_ERROR and code != _NO_TASKS:
            raise ServerUnavailable(
                f"the OpenEnv server at {url} does not tell its tasks: {error}"
            ) from error
        # It has no such API, or its environment no tasks.
        first = 0 if kind == "train" else 1
        return ({"id": f"seed-{number}", "seed": 2 * number + first} for number in count())
    except (URLError, OSError, ValueError, RecursionError) as error:
        raise ServerUnavailable(f"the OpenEnv server at {url} does not tell its tasks: {error}") from error
    if (most := sum(sizes.values())) > _MOST_TASKS:
        raise TaskError(f"the OpenEnv server at {url} says that it has {most:,} tasks")
    if not sizes:
        raise TaskError(f"the OpenEnv server at {url} has no tasks to {kind}: its splits are {sorted(kinds)}")
    return [
        {"id": f"{split}-{index}", "split": split, "index": index}
        for split, size in sizes.items()
        for index in range(size)
    ]


def _asked(url: str, path: str, sent: Mapping[str, object] | None = None) -> Any:
    token = os.environ.get("OPENENV_TOKEN", "")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    body = None if sent is None else json.dumps(sent).encode()
    with urlopen(Request(f"{url.rstrip('/')}{path}", body, headers), timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the world's names begin with http
        return json.loads(answer.read(_MOST_BYTES))
