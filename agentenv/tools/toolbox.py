"""Tools: Python functions that a model can call.

1. `@tool` leaves the function what it was: it can still be called, also as a method.
2. What the model is told and what is checked come from one reading of the signature.
3. Every call gets exactly one answer, in call order, whatever the tool does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from agentenv.core.by_name import did_you_mean
from agentenv.core.context import Context
from agentenv.core.errors import ToolDefinitionError
from agentenv.core.messages import CallStatus, ToolCall, ToolErrorKind, ToolResult, malformed
from agentenv.tools.arguments import check_repair
from agentenv.tools.schema.dialects import Dialect, Schema
from agentenv.tools.tool import Tool

__all__ = ["Toolbox"]


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
                    f"two tools are named {made.name!r} ({self._tools[made.name].function}, {made.function})",
                    remedy="give one of them another name with name=...",
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

        Calls of a tool made with `parallel=False` run alone, after those before them. How many calls an
        episode may run is the runner's to count: it hands over only those within the limit, of every
        environment, also of one without a toolbox.

        Raises:
            SandboxError: The sandbox failed; the calls still running are cancelled.
            EngineError: An engine that a tool uses failed; likewise.
        """
        context = context if context is not None else Context()
        results: list[ToolResult] = []
        for beside in self._at_once(calls):
            if len(beside) == 1:
                results.append(await self._answer(beside[0], context))
                continue
            tasks = [asyncio.create_task(self._answer(call, context)) for call in beside]
            try:
                results.extend(await asyncio.gather(*tasks))
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise
        return results

    def _at_once(self, calls: Sequence[ToolCall]) -> list[list[ToolCall]]:
        """Split calls into groups that may run at the same time, one group after another."""
        groups: list[list[ToolCall]] = []
        open_group = False
        for call in calls:
            alone = call.name in self._tools and not self._tools[call.name].options.parallel
            if open_group and not alone:
                groups[-1].append(call)
            else:
                groups.append([call])
            open_group = not alone
        return groups

    async def _answer(self, call: ToolCall, context: Context) -> ToolResult:
        mend = self._repair_json and call.status is CallStatus.INVALID_JSON and call.name in self._tools
        if call.status is not CallStatus.OK and not mend:
            return malformed(call)
        if call.name not in self._tools:
            return ToolResult(call.id, call.name, self._unknown(call.name), ToolErrorKind.UNKNOWN_TOOL)
        chosen = self._tools[call.name]
        return await chosen.call(
            call.arguments, context, call.id, values=call.values, repair_json=self._repair_json
        )

    def _unknown(self, name: str) -> str:
        if not self._tools:
            return f"unknown tool {name!r}; there are no tools"
        meant = did_you_mean(name, self._tools)
        hint = f"; {meant}" if meant else ""
        return f"unknown tool {name!r}{hint}; the tools are: {', '.join(self._tools)}"
