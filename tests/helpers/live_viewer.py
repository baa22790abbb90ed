"""The live viewer in a thread of this process, and a client of it."""

from __future__ import annotations

import asyncio
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from agentenv.runs.view import LiveServer


async def _ended() -> None:
    """End all other tasks of the loop, as `asyncio.run` does."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@contextmanager
def live(root: Path) -> Iterator[LiveServer]:
    """Serve all runs in a directory while the block runs."""
    server, loop, opened = LiveServer([], root), asyncio.new_event_loop(), AsyncExitStack()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(opened.enter_async_context(server.listening()), loop).result(30)
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(opened.aclose(), loop).result(30)
        asyncio.run_coroutine_threadsafe(_ended(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def fetch(url: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    """Return status and text of an answer; a redirect is followed."""
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
