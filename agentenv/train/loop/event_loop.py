"""Between the synchronous trainer and the event loop on which its episodes are played."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

__all__ = ["beside_the_loop", "blocking", "interrupted_together", "run_blocking"]

T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from synchronous code, also inside a running loop (a notebook)."""
    return blocking()(coroutine)


def blocking() -> Callable[[Coroutine[Any, Any, T]], T]:
    """Return what runs a coroutine from here: `asyncio.run`, or where a loop runs already, a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run
    return _run_in_thread


def _run_in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None
        begun.append((asyncio.get_running_loop(), task))
        return await coroutine

    with ThreadPoolExecutor(1) as pool:
        try:
            future = pool.submit(asyncio.run, run())
            # An interrupt that comes just before a wait begins is noticed only when the wait ends.
            while not wait([future], timeout=1).done:
                pass
            return future.result()
        except KeyboardInterrupt:
            # The thread knows of no interrupt, and leaving the block waits for it.
            for loop, task in begun:
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(task.cancel)
            raise


async def beside_the_loop(work: Callable[[], T]) -> T:
    """Run an update in a thread, so that episodes go on meanwhile."""
    threads = torch.get_num_threads()

    def run() -> T:
        torch.set_num_threads(threads)  # OpenMP keeps this number for each thread
        return work()

    return await asyncio.to_thread(run)


@contextmanager
def interrupted_together() -> Generator[None]:
    """Be interrupted, not failed, where a process that was interrupted too has gone away first."""
    try:
        yield
    except RuntimeError as error:
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            raise
        raise asyncio.CancelledError from error
