"""How much memory this process may still take."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["free_memory"]

SYSTEM = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Return the bytes that are free: of the system, or of this process's control group if those are fewer.

    Where neither is known, the answer is 0 on Linux, and elsewhere a number that no model reaches.
    """
    if not sys.platform.startswith("linux"):
        return sys.maxsize
    free = 0
    with suppress(OSError, ValueError):
        for line in SYSTEM.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    with suppress(OSError, ValueError):  # the file says `max` where the group has no limit
        limit = int((GROUP / "memory.max").read_text())
        free = min(free, limit - int((GROUP / "memory.current").read_text()))
    return max(free, 0)
