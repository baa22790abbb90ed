"""Find out which isolation works on this machine, and why the others do not."""

from __future__ import annotations

import asyncio
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from agentenv.core.errors import AgentEnvError, UsageError
from agentenv.sandbox.base import create, sandbox_registry
from agentenv.sandbox.local.backend import FIXES, TIERS
from agentenv.sandbox.local.jail import landlock
from agentenv.sandbox.local.pool import Tier

__all__ = ["BackendFinding", "SandboxDiagnosis", "diagnose", "doctor", "promises"]


@dataclass(frozen=True, slots=True)
class BackendFinding:
    """One way to run code, and whether it works on this machine."""

    name: str
    works: bool
    detail: str
    holds: tuple[str, ...] = ()
    """What it protects on this kernel."""
    leaves_open: tuple[str, ...] = ()
    """What it does not protect on this kernel."""

    def lines(self) -> list[str]:
        """Return the finding for a terminal."""
        lines = [f"  {'ok ' if self.works else 'no '} {self.name}: {self.detail}"]
        lines += [f"      holds: {text}" for text in self.holds]
        return lines + [f"      open:  {text}" for text in self.leaves_open]


@dataclass(frozen=True, slots=True)
class SandboxDiagnosis:
    """Which isolation works on this machine."""

    tier: str | None
    """Tier that the backend "auto" uses; None if no isolation works."""
    findings: tuple[BackendFinding, ...]
    machine: str
    fixes: tuple[str, ...]
    """What to do to get stronger isolation; empty if the strongest tier works."""

    def text(self) -> str:
        """Return the diagnosis for a terminal."""
        lines = [f"sandbox: {self.tier or 'NO ISOLATION'}   ({self.machine})"]
        for finding in self.findings:
            lines += finding.lines()
        lines += [f"  fix: {fix}" for fix in self.fixes]
        return "\n".join(lines)


async def diagnose() -> SandboxDiagnosis:
    """Return the diagnosis; it tries every tier by running code in it."""
    findings = [await _try_tier(tier) for tier in TIERS]
    tier = next((finding.name for finding in findings if finding.works), None)
    findings += [_of_package(name) for name in sandbox_registry if name not in ("local", "none")]
    machine = (
        f"{platform.system()} {platform.release()}, {platform.machine()}, uid {os.geteuid()}, {_kernel()}"
    )
    return SandboxDiagnosis(tier, tuple(findings), machine, () if tier == TIERS[0] else FIXES)


def doctor() -> SandboxDiagnosis:
    """Return the diagnosis; callers must not be inside an event loop."""
    return asyncio.run(diagnose())


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


def _of_package(name: str) -> BackendFinding:
    """Return what is known of a package's backend without starting it, which may cost money."""
    if needs := sandbox_registry.needs(name):
        return BackendFinding(name, False, f"not installed: {needs}")
    try:
        backend = sandbox_registry[name]
        lacks = getattr(backend, "lacks", str)()
    except UsageError as error:
        return BackendFinding(name, False, error.message)
    if lacks:
        return BackendFinding(name, False, f"installed, but {lacks}")
    if (promised := getattr(backend, "promises", None)) is None:
        return BackendFinding(name, True, "installed (not tried)")
    return BackendFinding(name, True, f"runs; use {name}:IMAGE", *promised)


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
