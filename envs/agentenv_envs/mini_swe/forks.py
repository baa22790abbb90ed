"""Run a library's examples in forks of a process, so that each begins afresh and none can hang the script."""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentenv_envs.mini_swe.examples import Session, sessions_of
from agentenv_envs.mini_swe.harness import outputs_of
from agentenv_envs.mini_swe.libraries import module_of
from agentenv_envs.mini_swe.pieces import Pieces

__all__ = ["in_fork", "show"]

_SLOW_S = 0.05
"""Processor time that a session may take."""
_CPU_S = 0.5
"""Processor time of a fork; a change that makes a loop endless costs as much."""
_WAIT_S = 60.0
_MEMORY = 1 << 30


def in_fork(run: Callable[[], Any], cpu_s: float = _CPU_S) -> Any:
    """Return what a function returns in a fork of this process; None if it fails or takes too long."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            gc.disable()  # a collection would copy the pages that both processes share
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
            os.dup2(os.open(os.devnull, os.O_RDWR), 2)
            result = json.dumps(run()).encode()
            while result:
                result = result[os.write(write, result) :]
        finally:
            os._exit(0)
    os.close(write)
    try:
        return _read(read)
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _read(pipe: int) -> Any:
    parts: list[bytes] = []
    until = time.monotonic() + _WAIT_S
    while select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
        part = os.read(pipe, 1 << 20)
        if not part:
            break
        parts.append(part)
    else:
        return None
    try:
        return json.loads(b"".join(parts))
    except ValueError:
        return None


def show(folder: str, path: str) -> None:
    """Write what each session of a file shows to the standard output, in an interpreter of its own."""
    source = (Path(folder) / path).read_text(encoding="utf-8")
    files = {
        file.relative_to(folder).as_posix(): file.read_text(encoding="utf-8")
        for file in Path(folder).rglob("*.py")
    }
    pieces = Pieces(files, Path(folder))
    pieces.warm_up(module_of(path))
    shown: dict[str, list[str] | None] = {}
    for session in sessions_of(source):

        def play(session: Session = session) -> list[str] | None:
            module = pieces.load(module_of(path))
            began = time.process_time()
            outputs = outputs_of(module, list(session.examples))
            return outputs if time.process_time() - began < _SLOW_S else None

        shown[session.name] = in_fork(play)
    sys.stdout.write(json.dumps(shown))
