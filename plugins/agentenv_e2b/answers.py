"""Write results of the sandbox as the messages that E2B's SDK reads."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

from agentenv.sandbox import ExecResult

__all__ = ["error_messages", "frame", "line", "messages", "process_events"]


def messages(result: ExecResult, mark: str) -> list[dict[str, Any]]:
    """Return a result as the messages that E2B's code interpreter sends.

    Args:
        result: the result of running code.
        mark: random text around the value of the last expression.
    """
    before, *rest = result.stdout.split(mark)
    values, after = rest[:1], "".join(rest[1:]).removeprefix("\n")
    told: list[dict[str, Any]] = []
    for kind, text in (("stdout", before + after), ("stderr", result.stderr)):
        if text and not (kind == "stderr" and result.status not in ("ok",)):
            told.append({"type": kind, "text": text, "timestamp": "0"})
    told += [{"type": "result", "text": value, "is_main_result": True} for value in values]
    if result.status != "ok":
        told.append(_error(result))
    return [*told, {"type": "end_of_execution"}]


def _error(result: ExecResult) -> dict[str, Any]:
    last = result.stderr.rstrip().rpartition("\n")[2]
    name, _, value = last.partition(": ")
    if result.status in ("error", "memory") and name.isidentifier():
        return {"type": "error", "name": name, "value": value, "traceback": result.stderr}
    name = "SystemExit" if result.status == "error" else "ExecutionEnded"
    traceback = result.stderr or result.note
    return {"type": "error", "name": name, "value": str(result.exit_code), "traceback": traceback}


def error_messages(error: Exception) -> list[dict[str, Any]]:
    """Return the messages for code that could not be run."""
    name = type(error).__name__
    told = {"type": "error", "name": name, "value": str(error), "traceback": f"{name}: {error}"}
    return [told, {"type": "end_of_execution"}]


def process_events(result: ExecResult) -> Iterator[dict[str, Any]]:
    """Yield the events of a command that has ended."""
    for name, text in (("stdout", result.stdout), ("stderr", result.stderr)):
        if text:
            data = base64.b64encode(text.encode(errors="replace")).decode()
            yield {"event": {"data": {name: data}}}
    code = result.exit_code if result.exit_code is not None else -1
    yield {"event": {"end": {"exitCode": code, "exited": True, "status": f"exit status {code}"}}}


def line(message: dict[str, Any]) -> bytes:
    """Return a message as a line of JSON."""
    return json.dumps(message).encode() + b"\n"


def frame(message: dict[str, Any], *, last: bool = False) -> bytes:
    """Return a message with the prefix of a Connect stream."""
    body = json.dumps(message).encode()
    return bytes([2 if last else 0]) + len(body).to_bytes(4, "big") + body
