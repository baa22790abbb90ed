"""What a process uses: memory, processor time, threads, and the delay of its event loop."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Self

from agentenv.core.threads import abandoned_threads

__all__ = ["Usage"]

_PROBE_S = 0.05
"""Time between two measurements of the event loop's delay."""
_PROBES = 1200
"""Number of the latest measurements from which the delay is computed: those of a minute."""


class Usage:
    """Measures this process while its context is open."""

    def __init__(self) -> None:
        self.live = 0
        """Number of episodes that are being played."""
        self.done = 0
        """Number of finished episodes."""
        self._lags: deque[float] = deque(maxlen=_PROBES)
        self._probe: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._expect(asyncio.get_running_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._probe is not None:
            self._probe.cancel()

    def _expect(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + _PROBE_S

        def measure() -> None:
            self._lags.append(max(0.0, loop.time() - due))
            self._expect(loop)

        self._probe = loop.call_at(due, measure)

    def row(self) -> dict[str, Any]:
        """Return the measurements as plain values."""
        return {
            "node": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "live": self.live,
            "done": self.done,
            "rss_mb": round(_resident_bytes() / 1e6, 1),
            "cpu_s": round(time.process_time(), 2),
            "lag_p99_s": round(self.lag_p99_s, 4),
            "threads": threading.active_count(),
            "abandoned": len(abandoned_threads()),
        }

    @property
    def lag_p99_s(self) -> float:
        """Delay of the event loop that 99 % of the measurements of the last minute do not exceed."""
        lags = sorted(self._lags)
        return lags[int(0.99 * (len(lags) - 1))] if lags else 0.0


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if sys.platform == "win32":
        return 0
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
