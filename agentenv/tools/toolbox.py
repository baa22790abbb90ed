"""The tools of an episode, and how the calls of a turn are run and answered.

1. `@tool` does not change the function: it can still be called, also as a method.
2. The schema for the model and the check of the arguments come from the same signature.
3. Every call gets exactly one answer, in call order, whatever the tool does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from agentenv.core.episode_env import Context
from agentenv.core.errors import ToolDefinitionError
from agentenv.core.messages import CallStatus, ToolCall, ToolErrorKind, ToolResult
from agentenv.core.refusals import malformed, unknown_tool
from agentenv.tools.arguments import check_repair
from agentenv.tools.registry import make_tool
from agentenv.tools.schema.dialects import Dialect, Schema
from agentenv.tools.tool import Tool

__all__ = ["Toolbox", "listed"]


class Toolbox:
    """The tools of an episode: their schemas, and the answers to a turn's calls.

    Args:
        tools: tools, names that `make_tool` takes, functions that are turned into tools, or tools of
            smolagents, LangChain, pydantic-ai, OpenAI's Agents SDK and Inspect.
        repair_json: repair a call's broken JSON where possible; `ToolResult.repaired` is then true.

    Raises:
        ToolDefinitionError: Two tools have the same name.
        UnknownTool: No tool has one of the names.
        DependencyMissing: `repair_json` is true and json-repair is not installed.
    """

    def __init__(
        self, tools: Iterable[Tool[..., Any] | Callable[..., Any] | str] = (), *, repair_json: bool = False
    ) -> None:
        if repair_json:
            check_repair()
        self._tools: dict[str, Tool[..., Any]] = {}
        self._repair_json = repair_json
        for entry in tools:
            tool = _tool_of(entry)
            if tool.name in self._tools:
                raise ToolDefinitionError(
                    f"two tools are named {tool.name!r} ({self._tools[tool.name].function}, {tool.function})",
                    remedy="give one of them another name with name=...",
                )
            self._tools[tool.name] = tool

    @classmethod
    def of(cls, holder: object, *, repair_json: bool = False) -> Toolbox:
        """Collect the methods of an object that are marked with `@tool`.

        The tools are in the order of their definition, those of base classes first. A subclass replaces a
        tool by defining the same name; if the new method is not marked, the tool is removed.
        """
        owner = type(holder)
        order: dict[str, object] = {}
        for base in reversed(owner.__mro__):
            order.update(vars(base))
        # This runs for each episode, and most of an environment's hundred attributes are none of the three.
        held = [each for each in order.values() if isinstance(each, (Tool, staticmethod, classmethod))]
        inner = [each if isinstance(each, Tool) else each.__func__ for each in held]
        tools = [each.__get__(holder, owner) for each in inner if isinstance(each, Tool)]
        return cls(tools, repair_json=repair_json)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools, in order."""
        return tuple(self._tools)

    def schemas(self, dialect: Dialect = "openai") -> list[Schema]:
        """Return the schemas of all tools; each call returns new objects."""
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
        """Run the calls of a turn at the same time and return their results in call order.

        A call of a tool with `parallel=False` runs alone, after the calls before it. The runner counts how
        many calls an episode may run, and passes only calls within that limit.

        Raises:
            InfrastructureError: What a tool uses failed: a sandbox, an engine or a server. The calls that
                still run are cancelled.
        """
        context = context if context is not None else Context()
        results: list[ToolResult] = []
        for group in self._at_once(calls):
            if len(group) == 1:
                results.append(await self._answer(group[0], context))
                continue
            tasks = [asyncio.create_task(self._answer(call, context)) for call in group]
            try:
                results.extend(await asyncio.gather(*tasks))
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise
        return results

    def _at_once(self, calls: Sequence[ToolCall]) -> list[list[ToolCall]]:
        """Split calls into groups that run one after another; the calls of a group run at the same time."""
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
            told = unknown_tool(call.name, self._tools)
            return ToolResult(call.id, call.name, told, ToolErrorKind.UNKNOWN_TOOL)
        chosen = self._tools[call.name]
        return await chosen.call(
            call.arguments, context, call.id, values=call.values, repair_json=self._repair_json
        )


def _tool_of(entry: Tool[..., Any] | Callable[..., Any] | str) -> Tool[..., Any]:
    if isinstance(entry, Tool):
        return entry
    if isinstance(entry, str):
        return make_tool(entry)
    from agentenv.tools.foreign import tool_of

    return tool_of(entry)


def listed(tools: Any) -> tuple[Any, ...]:
    """Return tools as a tuple; a text holds names, separated by commas."""
    if isinstance(tools, str):
        return tuple(name.strip() for name in tools.split(",") if name.strip())
    return tuple(tools)
