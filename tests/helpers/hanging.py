"""Environments whose code blocks the event loop of its worker, or stops the process."""

from __future__ import annotations

BLOCKS = """
import os
import signal
from pathlib import Path

import agentenv as ae


class Blocks(ae.ToolEnv):
    async def start(self, x):
        self.x = x
        return "go"

    async def reward(self):
        while self.x == 3:
            pass
        return 1.0


class Stops(Blocks):
    async def start(self, x):
        self.x = -x
        if x == 3 and not Path("stopped").exists():
            Path("stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return "go"


for entry in (Blocks, Stops):
    tasks = [{"x": x} for x in range(20)]
    ae.register(f"blocks/{entry.__name__}-v0", entry, tasks=tasks, override=True)
"""
