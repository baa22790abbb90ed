"""Between the synchronous trainer and the event loop on which its episodes are played."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

import torch

__all__ = ["beside_the_loop", "interrupted_together"]

T = TypeVar("T")


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
