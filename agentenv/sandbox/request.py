"""The request for one execution, and its limits."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from math import inf

from agentenv.core.errors import UsageError

__all__ = ["ExecRequest", "SandboxLimits"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one execution.

    Raises:
        UsageError: A limit is not a positive number.
    """

    timeout_s: float = 5.0
    """Time limit in seconds, from the start of the code."""
    cpu_s: int = 10
    """Processor time of one process in seconds; twice the time limit is allowed if that is more."""
    address_space_bytes: int = 512 * _MIB
    """Address space of one process. Numerical libraries map much more memory than they use."""
    memory_bytes: int = 1024 * _MIB
    """Memory of all processes of the execution together, checked every 100 ms."""
    max_processes: int = 32
    """Largest number of processes and threads together."""
    max_open_files: int = 128
    work_bytes: int = 32 * _MIB
    """Disk space in the working directory; /tmp has the same limit of its own."""
    shm_bytes: int = 16 * _MIB
    max_inodes: int = 8192
    max_file_bytes: int = 32 * _MIB
    output_bytes: int = 64 * 1024
    """Bytes of stdout that are returned, half from the head and half from the tail; the same for stderr."""
    max_output_bytes: int = 8 * _MIB
    """Largest output of an execution; one that writes more is ended."""
    collect_bytes: int = 8 * _MIB
    """Largest total size of the files that are kept from an execution for `read_file`."""

    def __post_init__(self) -> None:
        # All fields have one bound. It is checked here and not by `core.fields`, because sandboxes also run
        # under interpreters that have only the standard library.
        for limit in fields(self):
            value = getattr(self, limit.name)
            is_number = type(value) is int or (type(value) is float and limit.name == "timeout_s")
            if not is_number or not 0 < value < inf:
                raise UsageError(f"{limit.name} must be a positive number, not {value!r}")

    def as_dict(self) -> dict[str, int]:
        """Return the limits that the jail enforces."""
        values = asdict(self)
        del values["timeout_s"]
        return values

    def within(self, outer: SandboxLimits) -> SandboxLimits:
        """Return the smaller value of each limit, with the time limit of `outer`."""
        theirs = outer.as_dict()
        return replace(outer, **{name: min(value, theirs[name]) for name, value in self.as_dict().items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecRequest:
    """Code or a command with its settings. `agentenv.sandbox.checks` has checked every field."""

    code: str = ""
    """Python source text; ignored if there is a command."""
    command: list[str] | None = None
    timeout_s: float
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Files to write first, by path relative to the working directory."""
    env: dict[str, str] = field(default_factory=dict[str, str])
    stdin: bytes | None = None
    limits: SandboxLimits | None = None
    """Stricter limits for this execution only."""
    echo: bool = False
    """True prints the value of the last expression."""

    def job(self) -> dict[str, object]:
        """Return the request in the form that the jail receives."""
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
