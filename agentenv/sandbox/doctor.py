"""Say which isolation this machine offers, which one runs, and why not the others."""

from __future__ import annotations

import asyncio
import os
import platform
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from agentenv.core.errors import AgentEnvError
from agentenv.sandbox.base import create
from agentenv.sandbox.local.backend import FIXES, TIERS
from agentenv.sandbox.local.jail import landlock

__all__ = ["BackendFinding", "SandboxDiagnosis", "diagnose", "doctor"]


@dataclass(frozen=True, slots=True)
class BackendFinding:
    """One way to run code, and whether it works here."""

    name: str
    works: bool
    detail: str


@dataclass(frozen=True, slots=True)
class SandboxDiagnosis:
    """What this machine offers."""

    tier: str | None
    """The one that "auto" takes; None if there is no isolation."""
    findings: tuple[BackendFinding, ...]
    machine: str
    fixes: tuple[str, ...]
    """What to do, where something does not work; empty where the strongest tier runs."""

    def text(self) -> str:
        """Return the diagnosis for a terminal."""
        lines = [f"sandbox: {self.tier or 'NO ISOLATION'}   ({self.machine})"]
        lines += [f"  {'ok ' if one.works else 'no '} {one.name}: {one.detail}" for one in self.findings]
        lines += [f"  fix: {fix}" for fix in self.fixes]
        return "\n".join(lines)


async def diagnose() -> SandboxDiagnosis:
    """Try every tier by running code in it."""
    findings = [await _try_tier(tier) for tier in TIERS]
    tier = next((finding.name for finding in findings if finding.works), None)
    findings.append(_e2b())
    machine = (
        f"{platform.system()} {platform.release()}, {platform.machine()}, uid {os.geteuid()}, {_kernel()}"
    )
    return SandboxDiagnosis(tier, tuple(findings), machine, () if tier == TIERS[0] else FIXES)


def doctor() -> SandboxDiagnosis:
    """Return the diagnosis; for callers outside an event loop."""
    return asyncio.run(diagnose())


async def _try_tier(tier: str) -> BackendFinding:
    try:
        async with create(tier, size=1) as sandbox:
            result = await sandbox.run_code("print('ok')", timeout_s=10)
    except (AgentEnvError, OSError) as error:
        reason = error.message if isinstance(error, AgentEnvError) else str(error)
        return BackendFinding(tier, False, reason.removeprefix("no isolation on this machine. "))
    return BackendFinding(
        tier, result.stdout == "ok\n", f"runs; first execution {result.duration_s * 1000:.1f} ms"
    )


def _e2b() -> BackendFinding:
    if util.find_spec("e2b_code_interpreter") is None:
        return BackendFinding("e2b", False, "not installed: pip install 'agentenv-rl[e2b]'")
    if not os.environ.get("E2B_API_KEY"):
        return BackendFinding("e2b", False, "installed, but E2B_API_KEY is not set")
    return BackendFinding("e2b", True, "installed, with a key (not tried)")


def _kernel() -> str:
    parts = [f"Landlock ABI {landlock.abi()}"]
    for name, path in (
        ("user namespaces", "/proc/sys/user/max_user_namespaces"),
        ("AppArmor restricts them", "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"),
    ):
        if Path(path).exists():
            parts.append(f"{name}: {Path(path).read_text().strip()}")
    return ", ".join(parts)
