"""What the processor can do for a model: products in bfloat16, and cores that nobody else uses."""

from __future__ import annotations

import os
import time
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import cache
from math import ceil
from pathlib import Path

__all__ = ["busy_cores", "computes_bfloat16", "free_cores", "usable_cores"]

CPU_INFO = Path("/proc/cpuinfo")
CPU_TIMES = Path("/proc/stat")
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
WINDOW_S = 0.25
"""How long the processor is watched, in which the kernel counts 25 ticks of each core."""


@cache
def computes_bfloat16() -> bool:
    """Return whether the processor has instructions for products in bfloat16.

    Linux says so of the first core, and elsewhere the answer is False.
    """
    try:
        first = CPU_INFO.read_text().partition("\n\n")[0]
    except OSError:
        return False
    flags = (line.partition(":")[2] for line in first.splitlines() if line.startswith("flags"))
    return not {"avx512_bf16", "amx_tile"}.isdisjoint(" ".join(flags).split())


def _cores() -> AbstractSet[int]:
    """Return the numbers of the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return frozenset(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Return how many cores this process may use: those it may run on, within the quota of its groups."""
    quota = float("inf")
    with suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                root = GROUPS / ("cpu" if controllers else "")
                inner = root / path.lstrip("/")
                quota = min(quota, *(_quota(folder) for folder in (inner, *inner.parents)))
    return min(len(_cores()), max(1, ceil(quota))) if quota < float("inf") else len(_cores())


def _quota(folder: Path) -> float:
    """Return how many cores a control group may use, as either version of groups says."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # "max" is no number
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if int(quota) > 0:
                return int(quota) / int(period)
    return float("inf")


def busy_cores(before: str, after: str, cores: AbstractSet[int]) -> float:
    """Return how many of some cores were busy on average between two readings of Linux's processor times."""
    busy = total = 0
    for one, other in zip(before.splitlines(), after.splitlines(), strict=False):
        name, *ticks = one.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            spent = [int(b) - int(a) for a, b in zip(ticks, other.split()[1:], strict=True)][:8]
            total += sum(spent)
            busy += sum(spent) - spent[3] - spent[4]  # idle, and waiting for a disk
    return len(cores) * busy / total if total > 0 else 0.0


def free_cores() -> int:
    """Return how many usable cores other processes leave free, at least 1; it watches for a quarter second.

    A moment may be busier than usual, and the load of the last minute may be over, so the lower one counts.
    """
    usable, cores = usable_cores(), _cores()
    try:
        before, own = CPU_TIMES.read_text(), time.process_time()
        time.sleep(WINDOW_S)
        ours = (time.process_time() - own) / WINDOW_S
        busy = busy_cores(before, CPU_TIMES.read_text(), cores) - ours
    except OSError:
        return usable
    others = min(busy, os.getloadavg()[0])
    return max(1, min(usable, round(len(cores) - others)))
