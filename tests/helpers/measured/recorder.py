"""Record which lines of our own programs run in other processes, where coverage cannot.

A process of the jail sees no files, and most of these programs end by `SIGKILL`, so that nothing can be written
at their end. Each of them shares memory with the test process instead: a byte for each step from one line to
another. `Recorder` makes that memory and turns it into data of coverage; `sitecustomize` starts the recording in
programs that read it, and a longer start of the sandbox in the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from coverage import CoverageData

ROOT = Path(__file__).parents[3]
WATCHED = (
    "plugins/agentenv_jail/jail/*.py",
    "agentenv/tools/process_main.py",
    "agentenv/workers/local_main.py",
)
"""Files that run in processes of their own. The last two folders of a path tell them apart, also in a jail."""
HALF = 512
"""More than the number of lines of any file. A function is entered from, and left to, a negative line."""
CELLS = (2 * HALF) ** 2

START = """
def start(descriptor, names, half):
    import mmap, os, sys, threading
    cells = mmap.mmap(descriptor, len(names) * (2 * half) ** 2)
    os.close(descriptor)
    resume = __import__('opcode').opmap['RESUME']
    known = {}
    def enter(frame, event, _):
        file = frame.f_code.co_filename
        if file not in known:
            known[file] = names.get('/'.join(file.split('/')[-2:]))
        if known[file] is None:
            return None
        code, first = frame.f_code.co_code, frame.f_code.co_firstlineno
        base = known[file] * (2 * half) ** 2 + half
        before = frame.f_lineno if code[frame.f_lasti + 1] else -first
        def follow(frame, event, _):
            nonlocal before
            if event == 'line':
                now = frame.f_lineno
            elif event == 'return' and code[frame.f_lasti + 2 : frame.f_lasti + 3] != bytes([resume]):
                now = -first
            else:
                return follow
            cells[base + (before + half) * 2 * half + now] = 1
            before = now
            return follow
        return follow
    threading.settrace(enter)
    sys.settrace(enter)
"""
"""Defines `start`, with nothing but the standard library, because a jail has nothing else."""


class Recorder:
    """Memory that other processes write to, and how they are told of it."""

    def __init__(self) -> None:
        found = [path for pattern in WATCHED for path in sorted(ROOT.glob(pattern))]
        self._files = {"/".join(path.parts[-2:]): path for path in found}
        assert len(self._files) == len(found)
        self._memory = os.memfd_create("lines")
        os.ftruncate(self._memory, len(found) * CELLS)
        self._names = {name: number for number, name in enumerate(self._files)}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Make every process that is started from now on record, unless it starts with a clean environment."""
        from agentenv_jail import pool

        memory = f"os.open('/proc/{os.getpid()}/fd/{self._memory}', os.O_RDWR)"
        record = f"import os; exec({START!r}); start(<>, {self._names!r}, {HALF}); "
        path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
        patch.setenv("PYTHONPATH", path)
        patch.setenv("AGENTENV_RECORDED", record.replace("<>", memory))
        # The jail's first process can still open the memory; the one in the jail inherits a descriptor.
        first = (
            f"import os, sys; sys.path.insert(0, sys.argv[1]); lines = {memory}; kept = os.dup(lines); "
            f"os.set_inheritable(kept, True); {record.replace('<>', 'lines')}import jail.launch; "
            f"jail.launch.BOOT = {formatted(record)!r}.replace('<>', str(kept)) + jail.launch.BOOT; "
        )
        patch.setattr(pool, "BOOT", formatted(first) + pool.BOOT)

    def write(self, file: Path) -> None:
        """Write what was recorded as a file that `coverage combine` takes."""
        data = CoverageData(basename=str(file))
        data.add_arcs({str(self._files[name]): set(self._steps(at)) for name, at in self._names.items()})
        data.write()

    def _steps(self, number: int) -> Iterator[tuple[int, int]]:
        with os.fdopen(os.dup(self._memory), "rb") as memory:
            memory.seek(number * CELLS)
            cells = memory.read(CELLS)
        at = cells.find(1)
        while at != -1:
            before, now = divmod(at, 2 * HALF)
            yield before - HALF, now - HALF
            at = cells.find(1, at + 1)


def formatted(text: str) -> str:
    """Return the text of which `str.format` makes this one."""
    return text.replace("{", "{{").replace("}", "}}")
