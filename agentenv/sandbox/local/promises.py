"""What each tier protects on this kernel, and what it leaves open; the doctor prints it.

docs/security.md has the same promises with the test that holds each of them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from agentenv.sandbox.local.jail import landlock
from agentenv.sandbox.local.pool import Tier

__all__ = ["Promises", "promises"]

_COUNTED_PER_NAMESPACE = (5, 14)
"""First kernel that counts processes and pending signals separately for each user namespace."""
_ALWAYS = (
    "content of the machine's files",
    "modes, owners, times and attributes of the machine's files",
    "environment and memory of other processes",
    "signals to other processes",
    "network and abstract sockets",
    "kernel state that processes share (leases, locks, watches, timers, queues, keyrings)",
    "time, memory and output",
    "status of an execution",
)
_IN_EVERY_TIER = (
    "bugs of the kernel in the calls that are allowed",
    "buffers of pipes and sockets count towards no limit but that of descriptors",
    "a session reports its own steps",
)


@dataclass(frozen=True, slots=True)
class Promises:
    """What one tier protects on this kernel."""

    holds: tuple[str, ...]
    leaves_open: tuple[str, ...]


def promises(tier: Tier, *, abi: int | None = None, release: str | None = None) -> Promises:
    """Return what a tier protects.

    Args:
        tier: The tier, which must work on this machine.
        abi: Version of the kernel's Landlock; None means the one of this machine.
        release: Release of the kernel; None means the one of this machine.
    """
    version = landlock.abi() if abi is None else abi
    numbers = re.findall(r"\d+", os.uname().release if release is None else release)
    kernel = tuple(int(number) for number in numbers[:2])
    if tier == "namespace":
        return Promises(
            (*_ALWAYS, "disk, processes and threads"), (*_for_namespaces(version, kernel), *_IN_EVERY_TIER)
        )
    return Promises(
        (*_ALWAYS, "disk and threads, counted every 10 ms; other processes cannot be started"),
        (
            "names, sizes, owners and times of the machine's files can be seen",
            "it can be found out which process numbers exist",
            "modes, owners and times of the code's own files cannot be changed either: the calls do nothing",
            *_IN_EVERY_TIER,
        ),
    )


def _for_namespaces(version: int, kernel: tuple[int, ...]) -> tuple[str, ...]:
    found: list[str] = []
    if version == 0:
        found.append("this kernel has no Landlock, so only the mounts keep the machine's files apart")
    if kernel < _COUNTED_PER_NAMESPACE:
        found.append("this kernel counts processes and signals per user, so executions share the limit")
    return tuple(found)
