"""One team of OpenMP threads at a time.

Every thread that computes with torch has a team of its own. Once all teams together have more threads
than there are cores, GNU's OpenMP no longer lets them wait awake for the next operation, and to wake
them takes longer than a small matrix product does.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

__all__ = ["dismiss_team"]

PROCESS = os.getpid()
"""A fork of it has none of its teams, and OpenMP would wait for them."""
SOFT = 1
"""`omp_pause_soft`: settings stay as they are (OpenMP 5.0)."""


def dismiss_team() -> None:
    """End the calling thread's OpenMP team; its next operation makes a new one, in about a millisecond.

    Does nothing where torch computes without OpenMP 5, and in a forked process.
    """
    if sys.platform != "linux" or os.getpid() != PROCESS:
        return
    pause: Any = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(SOFT)
