"""The worker process of `agentenv.tools.process`: it runs one function, call after call.

Requests and answers are lines of JSON on standard input and output. The function's own output goes to
standard error. The argument is the file descriptor of the pipe that ends when the parent ends.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, BinaryIO

from agentenv.core.episode_env import Context
from agentenv.core.errors import InfrastructureError
from agentenv.core.faults import class_of, message_of
from agentenv.core.limits import RunLimits
from agentenv.core.threads import OwnThread, ThreadCall, own_thread
from agentenv.tools import process as isolation
from agentenv.tools.tool import Tool

CPU_GRACE_S = 10.0
"""Processor time beyond the time limit of a call, which the parent normally keeps."""


class _MainThread(OwnThread):
    """Runs synchronous functions where the process began, so that those which set signals can."""

    def submit(self, function: Callable[[], object], name: str) -> ThreadCall:
        """Run a function to its end."""
        call = ThreadCall(function, name, self)
        call.run()
        return call


def main() -> None:
    """Serve calls until the parent closes standard input."""
    _end_with_parent(int(sys.argv[1]))
    # Replies use a copy of standard output; the original becomes standard error, so that whatever the
    # function prints cannot mix with the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = map(json.loads, sys.stdin.buffer)
    try:
        tool = _load(next(requests))
    except BaseException as error:  # noqa: BLE001 - importing a module runs the author's code
        _reply(replies, {"failed": f"{class_of(error)}: {message_of(error)}"})
        return
    _reply(replies, {"ready": True})
    own_thread.set(_MainThread())
    context = Context(limits=RunLimits(tool_timeout_s=None))
    for request in requests:
        _limit_cpu(request["limit_s"])
        _reply(replies, asyncio.run(_answer(tool, request["arguments"], context)))


def _end_with_parent(pipe: int) -> None:
    """Start a process that kills this group when the pipe ends; a thread of a hung process would not run."""
    if os.fork():
        os.close(pipe)
        return
    for fd in range(3):  # so that the parent sees the end of the worker's output
        os.close(fd)
    os.read(pipe, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _limit_cpu(limit_s: float | None) -> None:
    """Let the kernel end this process when a call computes for longer than its limit allows all cores."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent, (_, hard) = used.ru_utime + used.ru_stime, resource.getrlimit(resource.RLIMIT_CPU)
    more = None if limit_s is None else spent + limit_s * (os.cpu_count() or 1) + CPU_GRACE_S
    soft = hard if more is None else int(more) if hard == resource.RLIM_INFINITY else min(int(more), hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _reply(target: BinaryIO, answer: dict[str, object]) -> None:
    target.write(json.dumps(answer).encode() + b"\n")
    target.flush()


def _load(request: dict[str, Any]) -> Tool[..., Any]:
    """Import the function's module, by name if possible and otherwise from its file, and make the tool."""
    sys.path[:] = request["path"]
    isolation.loading.set()
    try:
        function: Any = _import(request["module"], request["file"])
    finally:
        isolation.loading.clear()
    for name in request["qualname"].split("."):
        function = getattr(function, name)
    return Tool.from_function(function)


def _import(name: str, file: str) -> object:
    if name != "__main__":
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # The first package of the name may be another one here, which lacks what stands below it.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    spec = importlib.util.spec_from_file_location("agentenv_isolated_module", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"module {name} can neither be imported by name nor loaded from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


async def _answer(tool: Tool[..., Any], arguments: str, context: Context) -> dict[str, object]:
    try:
        result = await tool.call(arguments, context)
    except InfrastructureError as error:
        return {"raise": type(error).__name__, "text": str(error)}
    answer = asdict(result)
    return {key: answer[key] for key in ("content", "error_kind", "detail")}


if __name__ == "__main__":
    main()
