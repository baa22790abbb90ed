"""The live viewer in a thread of this process, and a client of it."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentenv.runs.view import LiveServer


@contextmanager
def live(root: Path, **options: Any) -> Iterator[LiveServer]:
    """Serve all runs in a directory while the block runs."""
    server = LiveServer([], root, **options)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


def fetch(url: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    """Return status and text of an answer; a redirect is followed."""
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
