"""Time programs in fresh processes, with compiled modules at hand as after an installation.

Without them, Python compiles every module of agentenv at each start, which adds half to what a first
evaluation costs. Shells of developers and containers often set `PYTHONDONTWRITEBYTECODE`, so compiled modules
are kept in a temporary directory here.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Spent:
    """What one process cost."""

    wall_s: float
    cpu_s: float
    """User and system time of the process and of the processes that it waited for."""
    output: str


@dataclass(frozen=True)
class Fresh:
    """Runs programs; the first run of each also fills the directory of compiled modules."""

    compiled: Path

    def run(self, command: Sequence[str], cwd: str | Path | None = None) -> Spent:
        """Run a program once, and check that it succeeds."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment = {**kept, "PYTHONPYCACHEPREFIX": str(self.compiled)}
        before, began = os.times(), time.perf_counter()
        done = subprocess.run(command, cwd=cwd, env=environment, check=True, capture_output=True)
        after, wall = os.times(), time.perf_counter() - began
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        return Spent(wall, cpu, done.stdout.decode(errors="replace"))

    def median(self, command: Sequence[str], runs: int, cwd: str | Path | None = None) -> Spent:
        """Return the run with the median processor time, after one that does not count."""
        self.run(command, cwd)
        found = sorted((self.run(command, cwd) for _ in range(runs)), key=lambda spent: spent.cpu_s)
        return found[runs // 2]


@contextmanager
def fresh_processes() -> Generator[Fresh]:
    """Open the directory of compiled modules."""
    with tempfile.TemporaryDirectory() as root:
        yield Fresh(Path(root))
