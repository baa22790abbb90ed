"""The live viewer in a thread of this process."""

from __future__ import annotations

import threading
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
