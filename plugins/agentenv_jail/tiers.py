"""Find out which tier works on this machine, what it protects, and what to do for a stronger one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from agentenv.core import AgentEnvError
from agentenv.sandbox import BackendFinding, SandboxDiagnosis, create
from agentenv_jail.jail import landlock
from agentenv_jail.pool import Tier

__all__ = ["FIXES", "TIERS", "diagnose", "promises"]

TIERS: tuple[Tier, ...] = ("namespace", "landlock")
FIXES = (
    "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined ...",
    "sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), user.max_user_namespaces=10000",
    "a kernel of 5.13 or later with Landlock",
    'backend "e2b" with E2B_API_KEY',
    'backend "none", which runs model code with NO isolation',
)


async def diagnose() -> SandboxDiagnosis:
    """Return the diagnosis; it tries every tier by running code in it."""
    findings = tuple([await _try_tier(tier) for tier in TIERS])
    tier = next((finding.name for finding in findings if finding.works), None)
    return SandboxDiagnosis(tier, findings, _kernel(), () if tier == TIERS[0] else FIXES)


async def _try_tier(tier: Tier) -> BackendFinding:
    try:
        async with create(tier, size=1) as sandbox:
            result = await sandbox.run_code("print('ok')", timeout_s=10)
    except (AgentEnvError, OSError) as error:
        reason = error.message if isinstance(error, AgentEnvError) else str(error)
        return BackendFinding(tier, False, reason.removeprefix("no isolation on this machine. "))
    if result.stdout != "ok\n":
        return BackendFinding(tier, False, f"the first execution failed: {result.text()}")
    promised = promises(tier)
    detail = f"runs; first execution {result.duration_s * 1000:.1f} ms"
    return BackendFinding(tier, True, detail, promised.holds, promised.leaves_open)


def _kernel() -> str:
    parts = [f"Landlock ABI {landlock.abi()}"]
    for name, path in (
        ("user namespaces", "/proc/sys/user/max_user_namespaces"),
        ("AppArmor restricts them", "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"),
    ):
        if Path(path).exists():
            parts.append(f"{name}: {Path(path).read_text().strip()}")
    return ", ".join(parts)


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
