"""The worker process of `agentenv.tools.process`: it runs one function, call after call.

Requests and answers are lines of JSON on standard input and output. The function's own output goes to
standard error. When standard input ends, the parent has ended, and the worker kills its process group.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import queue
import signal
import sys
import threading
from dataclasses import asdict
from typing import Any, BinaryIO

from agentenv.core.episode_env import Context
from agentenv.core.errors import EngineError, SandboxError
from agentenv.core.faults import class_of, message_of
from agentenv.core.limits import RunLimits
from agentenv.tools import process as isolation
from agentenv.tools.tool import Tool


def main() -> None:
    """Serve calls until the parent closes standard input."""
    # Replies use a copy of standard output; the original becomes standard error, so that whatever the
    # function prints cannot mix with the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, requests), daemon=True).start()
    try:
        tool = _load(requests.get())
    except BaseException as error:  # noqa: BLE001 - importing a module runs the author's code
        _reply(replies, {"failed": f"{class_of(error)}: {message_of(error)}"})
        return
    _reply(replies, {"ready": True})
    context = Context(limits=RunLimits(tool_timeout_s=None))
    while True:
        _reply(replies, asyncio.run(_answer(tool, requests.get()["arguments"], context)))


def _read(source: BinaryIO, requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in source:
        requests.put(json.loads(line))
    os.killpg(os.getpgrp(), signal.SIGKILL)


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
    except (SandboxError, EngineError) as error:
        return {"raise": type(error).__name__, "text": str(error)}
    answer = asdict(result)
    return {key: answer[key] for key in ("content", "error_kind", "detail")}


if __name__ == "__main__":
    main()
