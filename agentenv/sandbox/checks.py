"""Check the arguments of sandbox calls in one place for all backends.

Callers may be untyped, so the parameters here are wider than those of the public methods.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from agentenv.core.errors import UsageError
from agentenv.core.execution import ExecResult

__all__ = [
    "MAX_JOB_BYTES",
    "as_bytes",
    "clean_code",
    "clean_command",
    "clean_environment",
    "clean_files",
    "clean_input",
    "clean_path",
    "clean_timeout",
    "oversized",
]

MAX_JOB_BYTES = 32 << 20
"""Largest size of code, input and files of one execution together."""


def clean_path(path: object) -> str:
    """Return a path relative to the working directory.

    Raises:
        UsageError: The path is not text, is empty, or leads out of the working directory.
    """
    if not isinstance(path, str) or not path or "\0" in path:
        raise UsageError(f"a file name must be non-empty text without null characters, not {path!r}")
    inner = path.removeprefix("/work/")
    clean = posixpath.normpath(inner)
    if clean.startswith(("/", "../")) or clean in (".", ".."):
        raise UsageError(
            f"file name {path!r} leads out of the working directory", remedy="pass a path relative to it"
        )
    return clean


def as_bytes(data: object, what: str) -> bytes:
    """Return text as UTF-8, with lone surrogates replaced by question marks, and bytes unchanged."""
    if isinstance(data, str):
        return data.encode("utf-8", errors="replace")
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise UsageError(f"{what} must be text or bytes, not {type(data).__name__}")


def clean_files(files: Mapping[str, str | bytes] | None) -> dict[str, bytes]:
    """Return the files as bytes, by checked path."""
    return {clean_path(name): as_bytes(data, f"file {name!r}") for name, data in (files or {}).items()}


def clean_input(stdin: str | bytes | None) -> bytes | None:
    """Return the standard input as bytes."""
    return None if stdin is None else as_bytes(stdin, "stdin")


def clean_environment(env: Mapping[Any, Any] | None) -> dict[str, str]:
    """Return the environment variables, after checking that the kernel accepts them."""
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"environment variable {name!r} must be text with a text value, not {value!r}")
        if not name or "=" in name or "\0" in name + value:
            raise UsageError(f"environment variable {name!r} has an empty name, '=' or a null character")
    return dict(env or {})


def clean_timeout(timeout_s: object, default_s: float) -> float:
    """Return the time limit in seconds; None means the default."""
    if timeout_s is None:
        return default_s
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise UsageError(f"timeout_s must be a number of seconds, not {timeout_s!r}")
    if not isfinite(timeout_s) or timeout_s <= 0:
        raise UsageError(
            f"timeout_s must be more than 0 seconds, not {timeout_s}",
            remedy=f"leave it out for {default_s:g}",
        )
    return float(timeout_s)


def clean_command(cmd: str | Sequence[Any]) -> list[str]:
    """Return a command as a list of arguments."""
    command = ["/bin/sh", "-c", "--", cmd] if isinstance(cmd, str) else list(cmd)
    if not command or not all(isinstance(part, str) for part in command):
        raise UsageError(f"a command must be a line or a non-empty list of texts, not {cmd!r}")
    return command


def clean_code(code: object) -> str:
    """Return the code, after checking that it is text; its syntax is not checked."""
    if not isinstance(code, str):
        raise UsageError(f"code must be text, not {type(code).__name__}")
    return code


def oversized(size: int) -> ExecResult:
    """Return the result for a request that is too large to be run."""
    note = f"code, input and files have {size:,} bytes; at most {MAX_JOB_BYTES:,} can be run"
    return ExecResult(status="error", stderr=note + "\n", note=note)
