"""What becomes of an execution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["ExecResult", "ExecStatus"]

ExecStatus: TypeAlias = Literal["ok", "error", "timeout", "memory", "output_limit", "killed"]
"""How an execution ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What became of one execution."""

    status: ExecStatus
    """`ok`: exit code 0. `error`: any other exit code. `killed`: a signal that was not ours."""
    stdout: str = ""
    """Head and tail, with a marker between them, where the output was over its limit."""
    stderr: str = ""
    exit_code: int | None = None
    """As the kernel gave it; negative for a signal; None where the process cannot be asked."""
    truncated: bool = False
    """Some output was left out of `stdout` or `stderr`."""
    duration_s: float = 0.0
    """From the start of the code to its end."""
    queue_s: float = 0.0
    """Waiting for a free worker and a free processor; not part of the time limit."""
    max_rss_bytes: int = 0
    cpu_s: float = 0.0
    stdout_bytes: int = 0
    """Written by the code, before anything was left out."""
    stderr_bytes: int = 0
    files: Mapping[str, bytes] | None = None
    """Files that the execution made or changed in its working directory; None where not collected."""
    note: str = ""
    """What the sandbox has to say about the end: which limit, for instance."""

    @property
    def ok(self) -> bool:
        """True if the code ran to its end with exit code 0."""
        return self.status == "ok"

    def text(self) -> str:
        """Return stdout, stderr and the note as one text, as a tool shows it to a model."""
        parts = [self.stdout.rstrip("\n"), self.stderr.rstrip("\n")]
        if self.note and self.status not in ("ok", "error"):
            parts.append(f"[{self.note}]")
        return "\n".join(part for part in parts if part)
