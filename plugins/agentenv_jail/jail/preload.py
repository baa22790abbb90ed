"""Load modules and set up the environment once in the zygote, so that executions start faster."""

from __future__ import annotations

import importlib
import os
import resource
import sys
from typing import Any

from . import landlock, program

__all__ = ["UID", "preload"]

UID = 1000
"""User id of the code inside the jail."""

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
"""Modules that the zygote imports before it forks, so that executions need not import them."""


def preload(config: dict[str, Any]) -> None:
    """Import modules, and open the paths that every child may read."""
    sys.path[:] = [path for path in sys.path if not path.endswith(("/jail", "/sandbox"))]
    sys.path.extend(config["site"])
    for name in [*STANDARD, *config["preload"]]:
        importlib.import_module(name)
    program.prepare()
    _environment(config)
    config["mapped"] = _is_mapped(UID)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # Each readable path below stays open, and there may be more of them than the usual soft limit allows.
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    config["rules"] = []
    if config["tier"] == "landlock":
        if config["abi"] == 0:
            raise OSError(38, "the kernel has no Landlock")
        readable = [path for path in config["readable"] if os.path.exists(path)]
        readable += [f"/dev/{name}" for name in ("zero", "full", "random", "urandom")]
        config["rules"] = [(landlock.open_path(path), landlock.READ) for path in readable]
        config["rules"].append((landlock.open_path(config["listed"]), landlock.LIST))


def _is_mapped(uid: int) -> bool:
    # A container may map few ids, and setuid to one that is not mapped fails.
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return any(int(line.split()[0]) <= uid < int(line.split()[0]) + int(line.split()[2]) for line in file)


def _environment(config: dict[str, Any]) -> None:
    """Replace the whole environment by the one that programs in the jail see."""
    # What is not cleared is inherited, and environments of hosts hold keys and passwords.
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
