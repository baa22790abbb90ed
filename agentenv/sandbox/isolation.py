"""Find out which isolation works on this machine, and why the others do not."""

from __future__ import annotations

import asyncio
import os
import platform
from dataclasses import dataclass, replace

from agentenv.core.errors import UsageError
from agentenv.sandbox.sandbox import AUTO, sandbox_registry

__all__ = ["BackendFinding", "SandboxDiagnosis", "doctor"]


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
    """Which isolation works on this machine, as one backend finds it, or all of them."""

    tier: str | None
    """Tier that the backend uses, which is "auto" for all of them; None if no isolation works."""
    findings: tuple[BackendFinding, ...]
    machine: str = ""
    """What the machine offers for isolation."""
    fixes: tuple[str, ...] = ()
    """What to do to get stronger isolation; empty if the strongest tier works."""

    def text(self) -> str:
        """Return the diagnosis for a terminal."""
        lines = [f"sandbox: {self.tier or 'NO ISOLATION'}   ({self.machine})"]
        for finding in self.findings:
            lines += finding.lines()
        lines += [f"  fix: {fix}" for fix in self.fixes]
        return "\n".join(lines)


def doctor() -> SandboxDiagnosis:
    """Return the diagnosis of all installed backends; callers must not be inside an event loop."""
    return asyncio.run(_diagnose())


async def _diagnose() -> SandboxDiagnosis:
    own = await _of_backend(AUTO)
    others = [await _of_backend(name) for name in sandbox_registry if name not in (AUTO, "none")]
    findings = (*own.findings, *(finding for other in others for finding in other.findings))
    user = f", uid {os.geteuid()}" if os.name == "posix" else ""
    machine = f"{platform.system()} {platform.release()}, {platform.machine()}{user}"
    return replace(own, findings=findings, machine=", ".join(filter(None, (machine, own.machine))))


async def _of_backend(name: str) -> SandboxDiagnosis:
    """Return what a backend says of itself; one that says nothing is not started, which may cost money."""
    if needs := sandbox_registry.needs(name):
        return SandboxDiagnosis(None, (BackendFinding(name, False, f"not installed: {needs}"),))
    try:
        diagnose = getattr(sandbox_registry[name], "diagnose", None)
    except UsageError as error:
        return SandboxDiagnosis(None, (BackendFinding(name, False, error.message),))
    if diagnose is None:
        return SandboxDiagnosis(None, (BackendFinding(name, True, "installed (not tried)"),))
    return await diagnose()
