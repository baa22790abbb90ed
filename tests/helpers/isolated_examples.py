"""Functions that tests run in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

from agentenv.core import SandboxCrashed, ToolError
from agentenv.tools import tool


class Mode(Enum):
    ADD = "add"


@tool(isolated=True)
def where(x: int, mode: Mode = Mode.ADD) -> list[object]:
    """Say which process runs this."""
    print("printed text is no answer")
    return [os.getpid(), x, isinstance(mode, Mode)]


@tool(isolated=True, timeout_s=2)
def hang(note: str) -> None:
    """Start a grandchild and hang."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(note).write_text(str(child.pid))
    child.wait()


@tool(isolated=True)
def die(status: int) -> None:
    """End the process."""
    os._exit(status)


@tool(isolated=True)
async def fail(kind: str) -> None:
    """Raise."""
    raise {"tool": ToolError("for the model"), "sandbox": SandboxCrashed("gone")}.get(kind, ValueError("bug"))


def plain(x: int) -> int:
    """Double."""
    return 2 * x


@tool(isolated=True)
def spin() -> None:
    """Compute for ever, where no more than a moment is allowed."""
    process_main: Any = sys.modules["__main__"]
    process_main.CPU_GRACE_S = -1.0
    process_main._limit_cpu(1.0)
    while True:
        pass


@tool(isolated=True)
def alarmed(seconds: int) -> str:
    """Set an alarm, and take it back."""
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.alarm(seconds)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    return "in time"
