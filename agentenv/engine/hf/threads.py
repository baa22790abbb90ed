"""Let the engine and the trainer take turns with OpenMP threads, which otherwise stall each other.

Every thread that computes with torch has its own team of OpenMP threads. Once all teams together have
more threads than there are cores, GNU's OpenMP puts idle threads to sleep instead of letting them spin,
and waking them takes longer than a small matrix product.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

__all__ = ["dismiss_team"]

PROCESS = os.getpid()
"""The process that imported this module; a fork has no teams, and OpenMP would wait for them."""
SOFT = 1
"""Value of `omp_pause_soft` in OpenMP 5.0, which keeps the settings."""


def dismiss_team() -> None:
    """End the OpenMP team of the calling thread; its next operation makes a new one in about a millisecond.

    This does nothing in a forked process, or if torch does not use OpenMP 5.
    """
    if sys.platform != "linux" or os.getpid() != PROCESS:
        return
    pause: Any = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(SOFT)
