"""One execution as a caller asks for it, looked at once and then carried through."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentenv.sandbox.limits import SandboxLimits

__all__ = ["Request"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Code or a command, and what it runs with; every field has passed `agentenv.sandbox.checks`."""

    code: str = ""
    """Python source text; not looked at where there is a command."""
    command: list[str] | None = None
    timeout_s: float
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """By path relative to the working directory."""
    env: dict[str, str] = field(default_factory=dict[str, str])
    stdin: bytes | None = None
    limits: SandboxLimits | None = None
    """For this execution only."""
    echo: bool = False
    """Show the value of a last expression."""

    def job(self) -> dict[str, object]:
        """Return what the jail is told."""
        job: dict[str, object] = {
            "timeout_s": self.timeout_s,
            "files": self.files,
            "env": self.env,
            "stdin": self.stdin or b"",
        }
        if self.limits is not None:
            job["limits"] = self.limits.as_dict()
        if self.command is not None:
            return {**job, "kind": "exec", "command": self.command}
        return {**job, "kind": "code", "code": self.code, "echo": self.echo}
