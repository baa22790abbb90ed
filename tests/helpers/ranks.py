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

import torch
import torch.distributed as dist

PRELUDE = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer, LoraOptions
from agentenv.training.learners.torch import Policy
from agentenv.training.learners.torch.passes import accumulate
from agentenv.training.learners.torch.shards import local, whole
from agentenv.training.metrics import Meter
from agentenv.training.step import assign_weights
from helpers.ranks import gradient_of, keep, peak_of, play
from helpers.training import episode, group, make_row, tiny, tiny_gpt2

torch.set_num_threads(1)
OUT = sys.argv[1] if len(sys.argv) > 1 else ""
"""
"""What every program of ranks begins with: it is imported once, and every rank is a fork of the program."""


def run_driver(code: str, *arguments: str | Path) -> None:
    """Run a program after `PRELUDE`; it may fork, which a process with threads must not."""
    tests = str(Path(__file__).parents[1])
    paths = [tests, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *map(str, arguments)],
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


def keep(trainer: Any, path: str | Path) -> None:
    """Save the weights of a trainer in one tensor, whether its processes hold shards of them or copies."""
    from agentenv.training.learners.torch.shards import whole

    weights = torch.cat([whole(one.detach()).flatten() for one in trainer.model.parameters()])
    if trainer.world.rank == 0:
        torch.save(weights, path)


def gradient_of(trainer: Any, rows: list[Any], first: list[int]) -> tuple[torch.Tensor, Any]:
    """Return the gradient of all processes for rows, and the metrics.

    Args:
        trainer: the trainer.
        rows: the rows of all processes.
        first: for each process, the number of its first row.
    """
    from agentenv.training.learners.torch.passes import accumulate
    from agentenv.training.learners.torch.shards import whole
    from agentenv.training.metrics import Meter
    from agentenv.training.step import assign_weights

    world, learner, meter = trainer.world, trainer.learner, Meter()
    ends = [*first, len(rows)]
    mine = rows[ends[world.rank] : ends[world.rank + 1]]
    accumulate(learner.policy, assign_weights(mine, trainer.config, total=world.total), meter)
    world.add_gradients(learner.optimizer)
    grads = torch.cat([whole(one.grad).flatten() for one in learner.optimizer.masters])
    return grads, world.merge(meter.result())


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
