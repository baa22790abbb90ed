"""Podman's profile of system calls without those that reach beyond a container of bare code.

podman's own profile is as wide as root in a container needs it. Docker's refuses most of this by itself.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, cast

__all__ = ["narrowed", "profile_file"]

_PLACES = ("/etc/containers/seccomp.json", "/usr/share/containers/seccomp.json")
_REFUSED = {
    *("clone3", "setns", "unshare", "mount", "move_mount", "open_tree", "fsmount", "fsopen", "pivot_root"),
    *("umount", "umount2", "ptrace", "process_vm_readv", "process_vm_writev", "memfd_secret", "userfaultfd"),
    *("add_key", "keyctl", "request_key", "io_setup", "io_uring_setup", "bpf", "perf_event_open"),
    *("inotify_init", "inotify_init1", "timer_create", "mincore"),
}
"""Namespaces and mounts, the memory of other processes, what they read, and what has one limit for the whole
machine or for a user, such as keys, slots of asynchronous input, watches and timers. They fail as on a kernel
without them, so that programs use others."""
_NEW_NAMESPACES = 0x7E020000
_DOMAINS = (1, 2, 10, 16)
"""Unix, IPv4, IPv6 and netlink. Those to the hypervisor (40), for example, belong to no network namespace."""


def profile_file() -> str:
    """Return the path of the narrowed profile, kept as long as this process; empty without podman's."""
    kept = _kept()
    return "" if kept is None else kept.name


@cache
def _kept() -> IO[str] | None:
    found = next((path for path in map(Path, _PLACES) if path.is_file()), None)
    if found is None:
        return None
    file = tempfile.NamedTemporaryFile("w", prefix="agentenv-", suffix=".json")  # noqa: SIM115 - the cache holds it
    file.write(json.dumps(narrowed(json.loads(found.read_text()))))
    file.flush()
    return cast("IO[str]", file)


def narrowed(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Return a profile without the refused calls, and without calls of other architectures."""
    changed = _REFUSED | {"clone", "socket"}
    rules: list[dict[str, Any]] = []
    for rule in profile["syscalls"]:
        names = [name for name in rule["names"] if name not in changed]
        rules += [{**rule, "names": names}] if names else []
    same = [{"index": 0, "value": _NEW_NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]
    rules.append(_allow("clone", same))
    rules += [_allow("socket", [{"index": 0, "value": kind, "op": "SCMP_CMP_EQ"}]) for kind in _DOMAINS]
    arches = [{**each, "subArchitectures": []} for each in profile.get("archMap", [])]
    return {**profile, "archMap": arches, "syscalls": rules}


def _allow(name: str, arguments: Sequence[Mapping[str, object]]) -> dict[str, Any]:
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": list(arguments)}
