"""Tools: Python functions that a model can call.

1. `@tool` leaves the function what it was: it can still be called, also as a method.
2. What the model is told and what is checked come from one reading of the signature.
3. Every call gets exactly one answer, in call order, whatever the tool does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from agentenv.core.context import Context
from agentenv.core.errors import ToolDefinitionError
from agentenv.core.messages import CallStatus, ToolCall, ToolErrorKind, ToolResult
from agentenv.tools.arguments import check_repair
from agentenv.tools.schema.dialects import Dialect, Schema
from agentenv.tools.tool import Tool

__all__ = ["Toolbox"]

_STATUS_KINDS = {
    CallStatus.INVALID_JSON: ToolErrorKind.INVALID_JSON,
    CallStatus.UNCLOSED: ToolErrorKind.INVALID_JSON,
    CallStatus.MISSING_NAME: ToolErrorKind.UNKNOWN_TOOL,
    CallStatus.UNKNOWN_TOOL: ToolErrorKind.UNKNOWN_TOOL,
    CallStatus.BAD_ARGUMENTS: ToolErrorKind.BAD_ARGUMENTS,
    CallStatus.IN_THINKING: ToolErrorKind.NOT_RUN,
}


class Toolbox:
    """The tools of an episode: their schemas, and the answers to a turn's calls.

    Args:
        tools: tools, or functions to make them of.
        repair_json: mend broken JSON of a call where that is possible; `ToolResult.repaired` tells.

    Raises:
        ToolDefinitionError: Two tools have one name.
        DependencyMissing: Repair is asked for and json-repair is not installed.
    """

    def __init__(
        self, tools: Iterable[Tool[..., Any] | Callable[..., Any]] = (), *, repair_json: bool = False
    ) -> None:
        if repair_json:
            check_repair()
        self._tools: dict[str, Tool[..., Any]] = {}
        self._repair_json = repair_json
        for entry in tools:
            made = entry if isinstance(entry, Tool) else Tool.from_function(entry)
            if made.name in self._tools:
                raise ToolDefinitionError(
                    f"two tools are named {made.name!r} ({self._tools[made.name].function}, {made.function})"
                    "; give one of them another name with name=..."
                )
            self._tools[made.name] = made

    @classmethod
    def of(cls, holder: object, *, repair_json: bool = False) -> Toolbox:
        """Collect the methods of an object that are marked with `@tool`.

        They stand in the order of definition, those of base classes first. What a subclass puts in
        the place of a tool replaces it; without the mark it is no tool any more.
        """
        owner = type(holder)
        order: dict[str, object] = {}
        for base in reversed(owner.__mro__):
            order.update(vars(base))
        found: list[Tool[..., Any]] = []
        for attribute in order.values():
            inner = attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute
            if isinstance(inner, Tool):
                found.append(inner.__get__(holder, owner))
        return cls(found, repair_json=repair_json)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools, in order."""
        return tuple(self._tools)

    def schemas(self, dialect: Dialect = "openai") -> list[Schema]:
        """Return the schemas of all tools; new objects at every call."""
        return [entry.schema(dialect) for entry in self]

    def __iter__(self) -> Iterator[Tool[..., Any]]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def __getitem__(self, name: str) -> Tool[..., Any]:
        return self._tools[name]

    async def run(self, calls: Sequence[ToolCall], context: Context | None = None) -> list[ToolResult]:
        """Run the calls of a turn at once and answer each, in call order.

        Calls of a tool made with `parallel=False` run alone, after those before them.

        Raises:
            SandboxError: The sandbox failed; the calls still running are cancelled.
            EngineError: An engine that a tool uses failed; likewise.
        """
        context = context if context is not None else Context()
        left = context.tool_calls_left
        results: list[ToolResult] = []
        for stage in self._stages(calls):
            if len(stage) == 1:
                results.append(await self._answer(stage[0], context, len(results), left))
                continue
            first = len(results)
            tasks = [
                asyncio.create_task(self._answer(call, context, first + index, left))
                for index, call in enumerate(stage)
            ]
            try:
                results.extend(await asyncio.gather(*tasks))
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise
        return results

    def _stages(self, calls: Sequence[ToolCall]) -> list[list[ToolCall]]:
        """Split calls into groups that may run at the same time."""
        stages: list[list[ToolCall]] = []
        open_stage = False
        for call in calls:
            alone = call.name in self._tools and not self._tools[call.name].options.parallel
            if open_stage and not alone:
                stages[-1].append(call)
            else:
                stages.append([call])
            open_stage = not alone
        return stages

    async def _answer(self, call: ToolCall, context: Context, index: int, left: int | None) -> ToolResult:
        if left is not None and index >= left:
            text = "not run: the limit of tool calls is reached"
            return ToolResult(call.id, call.name, text, ToolErrorKind.NOT_RUN)
        mend = self._repair_json and call.status is CallStatus.INVALID_JSON and call.name in self._tools
        if call.status is not CallStatus.OK and not mend:
            return ToolResult(
                call.id, call.name, call.error or f"bad call: {call.status}", _STATUS_KINDS[call.status]
            )
        if call.name not in self._tools:
            return ToolResult(call.id, call.name, self._unknown(call.name), ToolErrorKind.UNKNOWN_TOOL)
        found = self._tools[call.name]
        return await found.call(call.arguments, context, call.id, repair_json=self._repair_json)

    def _unknown(self, name: str) -> str:
        if not self._tools:
            return f"unknown tool {name!r}; there are no tools"
        near = get_close_matches(name, self._tools, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"unknown tool {name!r}{hint}; the tools are: {', '.join(self._tools)}"
