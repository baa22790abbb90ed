"""The untrusted child of a worker, which confines itself before it receives the code."""

from __future__ import annotations

import os
import resource
import signal
from typing import Any, NamedTuple, NoReturn

from . import kernel, landlock, program, seccomp
from .kernel import prctl
from .preload import UID

__all__ = ["JOB", "NOBODY", "START", "Cell", "run"]

NOBODY = 65534
JOB, START = 3, 4
"""Descriptors besides the standard streams: jobs arrive on `JOB`, and its start is reported on `START`."""
_MAX_PENDING_SIGNALS = 64
"""Signals that wait to be delivered. Without a limit the code could take all that its user may have."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38


class Cell(NamedTuple):
    """The confinement of the children of one worker."""

    user_namespace: int
    """Descriptor of the user namespace, which has its own count of processes; -1 in the Landlock tier."""
    ruleset: int
    """Descriptor of the Landlock ruleset; -1 if the kernel has no Landlock."""
    proc: int
    """Descriptor of /proc, to which the code may not write."""
    home: str
    temporary: str


def run(config: dict[str, Any], cell: Cell, out: int, err: int) -> NoReturn:
    """Confine this process, then wait for the job and run it."""
    try:
        prctl(_PR_SET_DUMPABLE, 1)  # otherwise root would own its files in /proc
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for target, fd in ((0, os.open("/dev/null", os.O_RDONLY)), (1, out), (2, err)):
            os.dup2(fd, target)
        _confine(config, cell)
        os.chdir(cell.home)
        os.environ["HOME"], os.environ["TMPDIR"] = cell.home, cell.temporary
        seccomp.install(config["filter"], own_pid=os.getpid())
    except BaseException as error:  # noqa: BLE001 - the boundary: not confined, so nothing may run
        os.write(START, b"!" + str(error).encode())
        os._exit(71)
    program.serve(JOB, START, dict(config["limits"]))


def _confine(config: dict[str, Any], cell: Cell) -> None:
    """Give up privileges, set limits, and apply the namespace and the Landlock ruleset."""
    namespaces = cell.user_namespace != -1
    os.setsid()
    kernel.write("self/oom_score_adj", b"1000", cell.proc)
    if namespaces:
        kernel.setns(cell.user_namespace, kernel.CLONE_NEWUSER)
        if config["mapped"]:
            os.setresgid(UID, UID, UID)
            os.setresuid(UID, UID, UID)
    elif 0 in os.getresuid():
        os.seteuid(0)  # the init keeps root as its saved user
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    prctl(_PR_SET_DUMPABLE, 1)
    _limit(config["limits"], core_bytes=config["core_bytes"], namespaces=namespaces)
    kernel.drop_capabilities(bounding=namespaces)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if cell.ruleset != -1:
        landlock.restrict(cell.ruleset)
    kernel.close_range(START + 1, kernel.LAST)


def _limit(limits: dict[str, int], *, core_bytes: int, namespaces: bool) -> None:
    wanted = [
        (resource.RLIMIT_AS, limits["address_space_bytes"]),
        (resource.RLIMIT_CORE, core_bytes),
        (resource.RLIMIT_NOFILE, limits["max_open_files"]),
        (resource.RLIMIT_FSIZE, limits["max_file_bytes"]),
        (resource.RLIMIT_MEMLOCK, 64 * 1024),
        (resource.RLIMIT_STACK, 8 * 1024 * 1024),
        (resource.RLIMIT_SIGPENDING, _MAX_PENDING_SIGNALS),
        (resource.RLIMIT_MSGQUEUE, 0),
    ]
    if namespaces:
        wanted.append((resource.RLIMIT_NPROC, limits["max_processes"]))
    program.lower(wanted)
