"""Helpers that connect the synchronous trainer with the event loop on which its episodes are played."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from agentenv.core.threads import ThreadPool

__all__ = ["beside_the_loop"]

T = TypeVar("T")


_trainer_thread = ThreadPool("trainer", 1)


async def beside_the_loop(work: Callable[[], T]) -> T:
    """Run synchronous work in a thread, so that the event loop keeps playing episodes.

    All such work runs in the same thread, one call after the other: work on the weights, on files and with
    other processes must not overlap. A cancellation waits for its end, too. The thread is not one of those of
    the event loop, which environments may keep busy.
    """
    threads = torch.get_num_threads()

    def run() -> T:
        torch.set_num_threads(threads)  # OpenMP stores this number per thread
        return work()

    call = _trainer_thread.submit(run, "beside the loop")
    try:
        result, error = await asyncio.shield(call.future)
    except asyncio.CancelledError:
        while not call.future.done():
            with suppress(asyncio.CancelledError):  # what follows may save the weights
                await asyncio.wait([call.future])
        raise
    if error is not None:
        raise error
    return result
