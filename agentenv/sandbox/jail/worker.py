"""One execution: a trusted init, and a child that is confined before it gets the code.

The init answers for the child: it enforces the deadline and the memory limit, takes the exit code
from the kernel, and writes the verdict on a pipe that the child never has.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import resource
import signal
import sys
from typing import Any, NamedTuple, NoReturn

from . import kernel, landlock, program, seccomp
from .kernel import mount, prctl
from .watch import watch

__all__ = ["Ends", "init", "make_place", "preload"]

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
_UID = 1000
_NOBODY = 65534

STANDARD = [
    "ast",
    "bisect",
    "builtins",
    "cmath",
    "collections",
    "contextlib",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "io",
    "itertools",
    "json",
    "linecache",
    "math",
    "operator",
    "os",
    "random",
    "re",
    "statistics",
    "string",
    "sys",
    "threading",
    "time",
    "traceback",
    "types",
    "typing",
]
"""Loaded in the zygote, so that no execution pays for them."""


class Ends(NamedTuple):
    """A worker's descriptors."""

    job: int
    out: int
    err: int
    status: int
    start_read: int
    start_write: int


def preload(config: dict[str, Any]) -> None:
    """Load modules once, and open what every child needs."""
    sys.path[:] = [path for path in sys.path if not path.endswith(("/jail", "/sandbox"))]
    sys.path.extend(config["site"])
    for name in [*STANDARD, *config["preload"]]:
        importlib.import_module(name)
    program.prepare()
    _environment(config)
    config["mapped"] = _is_mapped(_UID)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    version = landlock.abi()
    config["abi"] = version
    if config["tier"] == "landlock":
        if version == 0:
            raise OSError(38, "the kernel has no Landlock")
        readable = config["readable"]
        config["rules"] = [
            (landlock.open_path(path), landlock.READ) for path in readable if os.path.exists(path)
        ]
        config["rules"] += [
            (landlock.open_path(f"/dev/{name}"), landlock.READ)
            for name in ("zero", "full", "random", "urandom")
        ]


def make_place(config: dict[str, Any]) -> str:
    """Make the working directory where there are no mounts; empty in the namespace tier."""
    if config["tier"] == "namespace":
        return ""
    place = f"{config['base']}/{os.urandom(8).hex()}"
    os.mkdir(place, 0o711)
    for name in ("work", "tmp"):
        os.mkdir(f"{place}/{name}", 0o700)
        if os.geteuid() == 0:
            os.chown(f"{place}/{name}", _NOBODY, _NOBODY)
    return place


def init(config: dict[str, Any], ends: Ends, place: str) -> NoReturn:
    """Answer for one child; never returns."""
    try:
        if config["tier"] == "namespace":
            _mounts(config["limits"], _UID if config["mapped"] else 0)
        else:
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        prctl(_PR_SET_DUMPABLE, 0)
        child = os.fork()
        if child == 0:
            _child(config, ends, place)
        for fd in (ends.job, ends.out, ends.err, ends.start_write):
            os.close(fd)
        watch(config, child, ends.start_read, ends.status, place)
    except BaseException as error:  # noqa: BLE001 - the boundary: the host is told by the pipe
        os.write(ends.status, b'{"failed": "%s"}\n' % repr(str(error)).replace('"', "'").encode())
    finally:
        os._exit(0)


def _mounts(limits: dict[str, int], owner: int) -> None:
    """Give this execution file systems of its own."""
    kernel.unshare(kernel.CLONE_NEWNS)
    shape = f"nr_inodes={limits['max_inodes']},mode=0700,uid={owner},gid={owner}"
    for target, size in (
        ("/work", limits["work_bytes"]),
        ("/tmp", limits["work_bytes"]),
        ("/dev/shm", limits["shm_bytes"]),
    ):
        mount("tmpfs", target, "tmpfs", _NOSUID | _NODEV, f"size={size},{shape}")
    mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC, "hidepid=2,subset=pid")


def _is_mapped(uid: int) -> bool:
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return any(int(line.split()[0]) <= uid < int(line.split()[0]) + int(line.split()[2]) for line in file)


def _child(config: dict[str, Any], ends: Ends, place: str) -> NoReturn:
    """Confine this process, then wait for the job and run it."""
    try:
        prctl(_PR_SET_DUMPABLE, 1)  # so that its files in /proc are its own
        _descriptors(ends)
        home = f"{place}/work" if place else "/work"
        temporary = f"{place}/tmp" if place else "/tmp"
        _confine(config, [home, temporary], namespaces=not place)
        os.chdir(home)
        if place:
            os.environ["HOME"], os.environ["TMPDIR"] = home, temporary
        seccomp.install(config["filter"], own_pid=os.getpid())
    except BaseException as error:  # noqa: BLE001 - the boundary: not confined, so nothing may run
        os.write(4, b"!" + str(error).encode())
        os._exit(71)
    program.serve(3, 4, dict(config["limits"]))


def _descriptors(ends: Ends) -> None:
    """Keep 0 (null), 1, 2, 3 (jobs) and 4 (start); close the rest."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in (ends.out, ends.err, ends.job, ends.start_write)]
    for target, fd in enumerate(high, start=1):
        os.dup2(fd, target, inheritable=target < 3)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)


def _confine(config: dict[str, Any], writable: list[str], *, namespaces: bool) -> None:
    """Give up everything but a small view of the machine."""
    limits: dict[str, int] = config["limits"]
    os.setsid()
    rules = _rules(config, writable)
    kernel.write("/proc/self/oom_score_adj", b"1000")
    root = os.geteuid() == 0
    if not namespaces and root:
        _become(_NOBODY)
    if namespaces:
        _nest(root_mapped=bool(config["mapped"]))
    _limit(limits, namespaces=namespaces)
    kernel.drop_capabilities(bounding=namespaces)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if config["abi"]:
        landlock.restrict(landlock.new_ruleset(rules, int(str(config["abi"]))))
    kernel.close_from(5)


def _rules(config: dict[str, Any], writable: list[str]) -> list[tuple[int, int]]:
    """Return what Landlock allows; the namespace tier sees nothing but the jail anyway."""
    if not config["abi"]:
        return []
    rules: list[tuple[int, int]] = list(config.get("rules", []))
    if config["tier"] == "namespace":
        rules.append((landlock.open_path("/"), landlock.READ))
        writable = [*writable, "/dev/shm"]
    rules.append((landlock.open_path("/dev/null"), landlock.WRITE))
    return rules + [(landlock.open_path(path), landlock.WRITE) for path in writable]


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    prctl(_PR_SET_DUMPABLE, 1)


def _nest(*, root_mapped: bool) -> None:
    """Enter a user namespace of this execution's own, in which processes are counted apart."""
    outer = _UID if root_mapped else 0
    if root_mapped:
        _become(_UID)
    prctl(_PR_SET_DUMPABLE, 1)
    kernel.unshare(kernel.CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_UID} {outer} 1"),
        ("gid_map", f"{_UID} {outer} 1"),
    ):
        kernel.write(f"/proc/self/{name}", text.encode())


def _limit(limits: dict[str, int], *, namespaces: bool) -> None:
    wanted = [
        (resource.RLIMIT_AS, limits["address_space_bytes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, limits["max_open_files"]),
        (resource.RLIMIT_FSIZE, limits["max_file_bytes"]),
        (resource.RLIMIT_MEMLOCK, 64 * 1024),
        (resource.RLIMIT_STACK, 8 * 1024 * 1024),
    ]
    if namespaces:
        wanted.append((resource.RLIMIT_NPROC, limits["max_processes"]))
    program.lower(wanted)


def _environment(config: dict[str, Any]) -> None:
    """Set what programs find in their environment; once, and nothing of ours is left."""
    os.environ.clear()
    os.environ.update(
        PATH="/usr/local/bin:/usr/bin:/bin",
        HOME="/work",
        TMPDIR="/tmp",
        LANG="C.UTF-8",
        PYTHONHASHSEED="0",
        PYTHONDONTWRITEBYTECODE="1",
        OMP_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
    )
    os.environ["PATH"] = f"{os.path.dirname(str(config['python']))}:{os.environ['PATH']}"
    if config["libraries"]:
        os.environ["LD_LIBRARY_PATH"] = str(config["libraries"])
    if config["site"]:
        os.environ["PYTHONPATH"] = ":".join(config["site"])
