"""Helpers that connect the synchronous trainer with the event loop on which its episodes are played."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

import torch

__all__ = ["beside_the_loop", "interrupted_together"]

T = TypeVar("T")


async def beside_the_loop(work: Callable[[], T]) -> T:
    """Run an update in a thread, so that the event loop keeps playing episodes."""
    threads = torch.get_num_threads()

    def run() -> T:
        torch.set_num_threads(threads)  # OpenMP stores this number per thread
        return work()

    return await asyncio.to_thread(run)


@contextmanager
def interrupted_together() -> Generator[None]:
    """Turn a RuntimeError into a cancellation if this task is being cancelled.

    When all processes are interrupted, the first one to end breaks the connections of the others. They
    must then report an interruption, not a failure.
    """
    try:
        yield
    except RuntimeError as error:
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            raise
        raise asyncio.CancelledError from error
