"""How an execution ended, and the result that a backend makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from agentenv.core.execution import ExecResult, ExecStatus
from agentenv.sandbox.output import Output
from agentenv.sandbox.request import SandboxLimits

__all__ = ["ExecVerdict", "settle"]


@dataclass(slots=True)
class ExecVerdict:
    """How an execution ended, as its backend reports it."""

    exit: int = -9
    reason: str = ""
    duration_s: float = 0.0
    cpu_s: float = 0.0
    max_rss_bytes: int = 0
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    files_complete: bool = True


def settle(
    verdict: ExecVerdict, out: Output, err: Output, timeout_s: float, limits: SandboxLimits
) -> ExecResult:
    """Make the result from a verdict and the output."""
    stderr = err.text()
    status, note = _status(verdict, stderr, timeout_s, limits)
    result = ExecResult(
        status=status,
        stdout=out.text(),
        stderr=stderr,
        exit_code=verdict.exit,
        truncated=out.truncated or err.truncated,
        duration_s=verdict.duration_s,
        max_rss_bytes=verdict.max_rss_bytes,
        cpu_s=verdict.cpu_s,
        stdout_bytes=out.total,
        stderr_bytes=err.total,
        files=verdict.files,
        note=note,
    )
    if not verdict.files_complete:
        text = "; ".join(part for part in (note, "files over the limit were not kept") if part)
        result = replace(result, note=text)
    return result


def _status(
    verdict: ExecVerdict, stderr: str, timeout_s: float, limits: SandboxLimits
) -> tuple[ExecStatus, str]:
    notes: dict[str, tuple[ExecStatus, str]] = {
        "timeout": ("timeout", f"time limit of {timeout_s:g} s reached"),
        "cpu": ("timeout", "processor time limit reached"),
        "memory": ("memory", f"memory limit of {limits.memory_bytes >> 20} MiB reached"),
        "output_limit": ("output_limit", f"output limit of {limits.max_output_bytes >> 10} KiB reached"),
        "disk": ("killed", f"disk limit of {2 * limits.work_bytes >> 20} MiB reached"),
        "processes": ("killed", f"limit of {limits.max_processes} processes and threads reached"),
    }
    if verdict.reason in notes:
        return notes[verdict.reason]
    if verdict.exit == 0:
        return "ok", ""
    if verdict.exit < 0:
        return "killed", f"ended by signal {-verdict.exit}"
    if verdict.exit == 1 and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        return _memory_error(verdict, limits)
    return "error", f"exit code {verdict.exit}"


def _memory_error(verdict: ExecVerdict, limits: SandboxLimits) -> tuple[ExecStatus, str]:
    """Return the status of a program that says it had too little memory.

    Anyone can print these words, so they count only if the kernel saw that the program used much memory. A
    single request that is too large uses none, and is an error of the program.
    """
    note = f"a process may use {limits.address_space_bytes >> 20} MiB of addresses"
    if 2 * verdict.max_rss_bytes >= limits.address_space_bytes:
        return "memory", note
    return "error", f"exit code 1; {note}"
