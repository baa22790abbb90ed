"""Use a tool in the ways that a model does, and report in words what is wrong."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from agentenv.core.episode_env import Context
from agentenv.core.errors import SandboxUnavailable, ToolDefinitionError
from agentenv.core.messages import ToolErrorKind, ToolResult
from agentenv.testing.checker import CheckReport, Finding
from agentenv.testing.fuzz import random_call
from agentenv.tools.registry import make_tool
from agentenv.tools.tool import Tool

__all__ = ["check_tool"]

_CRASHES = {ToolErrorKind.EXCEPTION, ToolErrorKind.TIMEOUT}
_LONG_S = 10.0
_LONG_CHARS = 500_000


async def check_tool(tool: str | Tool[..., Any], *, fuzz_calls: int = 300, seed: int = 0) -> CheckReport:
    """Check a tool.

    A tool that runs code gets a sandbox. Without one on this machine, the error says what is missing.

    Args:
        tool: a tool, or a name that `make_tool` takes.
        fuzz_calls: number of random calls.
        seed: seed of the random calls.

    Raises:
        UnknownTool: There is no such tool.
        SandboxError: The tool needs a sandbox, and none works here.
    """
    made = make_tool(tool) if isinstance(tool, str) else tool
    async with AsyncExitStack() as stack:
        caller = _Caller(made, stack)
        findings = [
            _schema(made),
            await _timed("fuzz", lambda: _fuzz(caller, fuzz_calls, random.Random(seed))),
            await _timed("overflow", lambda: _overflow(caller)),
        ]
    return CheckReport(f"tool {made.name}", tuple(findings))


class _Caller:
    """Calls a tool, and opens a sandbox when the tool first asks for one."""

    def __init__(self, tool: Tool[..., Any], stack: AsyncExitStack) -> None:
        self.tool = tool
        self._stack = stack
        self._context = Context()

    async def call(self, arguments: str) -> ToolResult:
        try:
            return await self.tool.call(arguments, self._context)
        except SandboxUnavailable:
            if self._context.sandbox is not None:
                raise
            from agentenv.sandbox.sandbox import create

            pool = await self._stack.enter_async_context(create("auto", size=1))
            lent = await self._stack.enter_async_context(pool.lease())
            self._context = Context(sandbox=lent)
            return await self.tool.call(arguments, self._context)


async def _timed(name: str, check: Callable[[], Awaitable[tuple[str, str]]]) -> Finding:
    began = time.perf_counter()
    wrong, text = await check()
    seconds = round(time.perf_counter() - began, 3)
    return Finding(name, "problem" if wrong else "ok", wrong or text, seconds)


def _schema(tool: Tool[..., Any]) -> Finding:
    """The model is told what the tool and its arguments are for, and strict mode can express them."""
    try:
        tool.schema("strict")
        strict = "strict mode too"
    except ToolDefinitionError as error:
        strict = f"not in strict mode: {error}"
    if tool.notes:
        return Finding("schema", "problem", "; ".join(tool.notes), 0.0)
    return Finding("schema", "ok", f"the tool and its arguments are described; {strict}", 0.0)


async def _fuzz(caller: _Caller, calls: int, rng: random.Random) -> tuple[str, str]:
    """Random calls, valid and invalid, never crash the tool."""
    refused = 0
    for number in range(calls):
        arguments = str(random_call([caller.tool.schema()], rng, number)["function"]["arguments"])
        result = await caller.call(arguments)
        if result.error_kind in _CRASHES:
            last = (result.detail or result.text).strip().splitlines()[-1:]
            remedy = "raise ae.ToolError for a mistake of the model"
            return f"{caller.tool.name}({arguments[:120]}) crashed: {''.join(last)[:200]}; {remedy}", ""
        refused += result.is_error
    return "", f"{calls} random calls: no crash; {refused} refused with a message"


async def _overflow(caller: _Caller) -> tuple[str, str]:
    """Arguments of a megabyte are answered soon, and not with as much text."""
    properties = caller.tool.parameters.get("properties", {})
    # More than a megabyte in total is refused before it reaches the tool.
    long = "9" * (800_000 // max(1, len(properties)))
    began = time.perf_counter()
    result = await caller.call(json.dumps(dict.fromkeys(properties, long)))
    took = time.perf_counter() - began
    if result.error_kind in _CRASHES:
        return f"it fails on a megabyte of input: {result.detail[-200:]}", ""
    if took > _LONG_S:
        return f"a megabyte of input takes {took:.0f} s", ""
    if len(result.text) > _LONG_CHARS:
        return f"it answers a megabyte of input with {len(result.text)} characters; shorten the answer", ""
    return "", f"a megabyte of input is answered in {took:.1f} s with {len(result.text)} characters"
