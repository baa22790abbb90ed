"""Run a function in several processes that train together, and measure what it allocates."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist


def run_driver(code: str, *arguments: str | Path) -> None:
    """Run a program that may fork and may import `helpers`, because a process with threads must not fork."""
    tests = str(Path(__file__).parents[1])
    paths = [tests, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def play(work: Callable[[], None], size: int) -> None:
    """Run a function in forks of this process, as torchrun would; raise if one of them fails."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    ranks = []
    for rank in range(size):
        pid = os.fork()
        if pid:
            ranks.append(pid)
            continue
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
        )
        try:
            work()
            if dist.is_initialized():
                dist.destroy_process_group()
        except BaseException:  # noqa: BLE001 - a fork must end here, and its parent raises
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    failed = [os.waitpid(pid, 0)[1] for pid in ranks]
    assert not any(failed), (work, size, failed)


def peak_of(work: Callable[[], object]) -> int:
    """Return the most bytes that a function holds at once on the CPU, beyond what is there before it."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()  # what an earlier measurement left would be freed within this one, and lower its peak
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    held = peak = 0
    profiler: Any = found.profiler
    for event in sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
