"""One execution as a caller asks for it, and what it may use."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

from agentenv.core.bounds import PositiveInt, PositiveSeconds, check_bounds

__all__ = ["ExecRequest", "SandboxLimits"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one execution may use.

    Raises:
        UsageError: A limit is not a positive number.
    """

    timeout_s: PositiveSeconds = 5.0
    """Wall time, from the start of the code."""
    cpu_s: PositiveInt = 10
    """Processor time of one process, or twice the time limit where that is more."""
    address_space_bytes: PositiveInt = 512 * _MIB
    """Of one process. Numerical libraries map much more than they use."""
    memory_bytes: PositiveInt = 1024 * _MIB
    """Of the whole execution, looked at every 100 ms."""
    max_processes: PositiveInt = 32
    """Processes and threads together."""
    max_open_files: PositiveInt = 128
    work_bytes: PositiveInt = 32 * _MIB
    """In the working directory, and again in /tmp."""
    shm_bytes: PositiveInt = 16 * _MIB
    max_inodes: PositiveInt = 8192
    max_file_bytes: PositiveInt = 32 * _MIB
    output_bytes: PositiveInt = 64 * 1024
    """Kept of stdout, and again of stderr: the head and the tail."""
    max_output_bytes: PositiveInt = 8 * _MIB
    """An execution that writes more is ended."""
    collect_bytes: PositiveInt = 8 * _MIB
    """Of the files that an execution leaves, kept for `read_file`."""

    def __post_init__(self) -> None:
        check_bounds(self)

    def as_dict(self) -> dict[str, int]:
        """Return the limits that the jail enforces."""
        values = asdict(self)
        del values["timeout_s"]
        return values

    def within(self, outer: SandboxLimits) -> SandboxLimits:
        """Return the smaller of each two limits, with the time limit of `outer`."""
        theirs = outer.as_dict()
        return replace(outer, **{name: min(value, theirs[name]) for name, value in self.as_dict().items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecRequest:
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
