"""Keep an agent's program: wait for its exit, and leave none of the processes that it started.

The keeper is a process between us and the program, and a script of its own without an import of ours.

1. On Linux it is the subreaper of the program: whatever the program starts, a session or a daemon of its own
   included, stays a descendant of the keeper.
2. Once the program has exited, or the keeper is told to end, or our process has died, all descendants are
   ended: politely first, then not. Only then the keeper exits, with the program's exit code.
3. If our process has died, the keeper removes the folder of the episode, because nobody else will.

Elsewhere it ends the process group of the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time
from pathlib import Path

__all__ = ["END_WITHIN_S", "main"]

END_WITHIN_S = 3.0
"""Time that a program has to end by itself."""
_LEFT_END_WITHIN_S = 1.0
"""Time that the processes have that a program leaves behind."""
_GIVE_UP_S = 10.0
"""Time after which processes that cannot be killed, because the kernel holds them, are left alone."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TOLD = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


def main(ours: int, folder: str, command: list[str]) -> int:
    """Run a program to its exit and return its exit code.

    Args:
        ours: id of our process.
        folder: folder of the episode.
        command: the program and its arguments.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _TOLD)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    child = os.fork()
    if not child:
        _become(command)
    code = None
    while code is None and os.getppid() == ours and signal.sigwait(_TOLD) == signal.SIGCHLD:
        code = _reaped(child)
    _end_all(child, END_WITHIN_S if code is None else _LEFT_END_WITHIN_S)
    if os.getppid() != ours:
        shutil.rmtree(folder, ignore_errors=True)
    return 128 + signal.SIGTERM if code is None else code


def _become(command: list[str]) -> None:
    """Become the program, in a session of its own that ends with the keeper."""
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TOLD)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the command is the author's, and no shell reads it
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error}\n".encode())
        os._exit(127)


def _reaped(child: int) -> int | None:
    """Reap the processes that have ended, and return the exit code of the program if it is one of them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = os.waitstatus_to_exitcode(ended[1])
                code = status if status >= 0 else 128 - status
    return code


def _end_all(child: int, politely_s: float) -> None:
    """End the program and all that it started."""
    began = time.monotonic()
    _tell(child, signal.SIGTERM)
    while (waited := time.monotonic() - began) < _GIVE_UP_S and _is_left(child):
        if waited > politely_s:
            _tell(child, signal.SIGKILL)
        time.sleep(0.02)


def _is_left(child: int) -> bool:
    _reaped(child)
    if sys.platform == "linux":
        return bool(_descendants())
    try:
        os.killpg(child, 0)
    except OSError:
        return False
    return True


def _tell(child: int, number: int) -> None:
    for pid in _descendants():
        with contextlib.suppress(OSError):
            os.kill(pid, number)
    with contextlib.suppress(OSError):
        os.killpg(child, number)


def _descendants() -> list[int]:
    """Return the processes below this one; none where the kernel does not list them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name of a program, in parentheses, may contain anything.
            parent = entry.read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(entry.parent.name))
    pids, waiting = [], children.get(os.getpid(), [])
    while waiting:
        pid = waiting.pop()
        pids.append(pid)
        waiting += children.get(pid, [])
    return pids


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
