"""Helpers that connect the synchronous trainer with the event loop on which its episodes are played."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from agentenv.core.threads import ThreadPool, to_its_end

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

    return await to_its_end(_trainer_thread, run, "beside the loop")
