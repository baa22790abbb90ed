"""Use the tools of an MCP server as tools of an environment.

The model sees the server's own schemas. An error that the server reports is shown to the model; a broken
connection is an exception of the tool like any other. The session belongs to the event loop that opened it,
so open it around a run, in the same event loop.

MCP has no reset and no seeds. If a server keeps state, all episodes that use its tools share that state.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

from agentenv.core.errors import DependencyMissing, ToolError, UsageError
from agentenv.core.faults import class_of, message_of
from agentenv.tools.content import Image
from agentenv.tools.tool import Tool

__all__ = ["mcp_tools"]

MAX_TOOLS = 10_000


@asynccontextmanager
async def mcp_tools(
    server: Any, *, only: Collection[str] | None = None, timeout_s: float | None = 30.0
) -> AsyncGenerator[list[Tool[..., Any]]]:
    """Connect to an MCP server and yield its tools; disconnect at the end of the block.

    Example:
        ```python
        async with mcp_tools(["python", "server.py"]) as tools:
            env.tools = tools
        ```

    Args:
        server: a command as a list of words, a URL, or an MCP server object of this process.
        only: names of the tools to use; None means all.
        timeout_s: time limit of the connection, of the list of tools, and of one call.

    Raises:
        DependencyMissing: The package mcp is not installed.
        UsageError: The server cannot be reached, a name in `only` is not one of its tools, or it does not end
            its list of tools.
    """
    try:
        import mcp  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DependencyMissing.of("mcp", "mcp", purpose="connecting to an MCP server") from error
    package: Any = mcp
    if isinstance(server, (list, tuple)):
        command, *words = map(str, server)
        server = package.StdioServerParameters(command=command, args=words)
    # The client's task group would wrap an exception raised inside it in an ExceptionGroup. The exception is
    # therefore carried out of the block and raised there.
    failure: Exception | None = None
    async with AsyncExitStack() as stack:
        client = await _connected(stack, package.Client(server), timeout_s)
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    offered = await _listed(client)
            except TimeoutError:
                raise UsageError(f"the MCP server did not list its tools within {timeout_s:g} s") from None
            except Exception as error:  # such as schemas that are none
                raise UsageError(f"the MCP server's list of tools cannot be read: {error}") from error
            missing = set(only or ()) - {tool.name for tool in offered}
            if missing:
                names = ", ".join(tool.name for tool in offered)
                raise UsageError(
                    f"the MCP server has no tool {sorted(missing)[0]!r}", remedy=f"it has: {names}"
                )
            yield [_tool(client, tool, timeout_s) for tool in offered if only is None or tool.name in only]
        except Exception as error:  # noqa: BLE001 - raised again below
            failure = error
    if failure is not None:
        raise failure


async def _connected(stack: AsyncExitStack, client: Any, timeout_s: float | None) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await stack.enter_async_context(client)
    except TimeoutError:
        raise UsageError(f"the MCP server did not answer within {timeout_s:g} s") from None
    except Exception as error:  # such as a program that does not exist, or one that speaks no MCP
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cast("BaseExceptionGroup[BaseException]", cause).exceptions[0]
        raise UsageError(
            f"the MCP server cannot be reached: {class_of(cause)}: {message_of(cause)}",
            remedy="start its command by hand, or open its address, and see what it says",
        ) from error


async def _listed(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools.extend(page.tools)
        if len(tools) > MAX_TOOLS or page.next_cursor == cursor is not None:
            raise UsageError(
                f"the MCP server lists more than {MAX_TOOLS:,} tools, or one page again and again"
            )
        cursor = page.next_cursor
        if not cursor:
            return tools


def _tool(client: Any, offered: Any, timeout_s: float | None) -> Tool[..., Any]:
    async def call(**arguments: Any) -> Any:
        answer = await client.call_tool(offered.name, arguments)
        parts = [_part(part) for part in answer.content]
        if answer.is_error:
            raise ToolError("\n".join(str(part) for part in parts))
        words = [part for part in parts if isinstance(part, str)]
        return "\n".join(words) if len(words) == len(parts) else parts

    return Tool.from_schema(
        offered.name, offered.description or "", offered.input_schema, call, timeout_s=timeout_s
    )


def _part(part: Any) -> str | Image:
    if part.type == "text":
        return str(part.text)
    if part.type == "image":
        return Image(base64.b64decode(part.data), part.mime_type)
    # Audio and embedded resources do not fit into a chat message; the model is told that they were left out.
    return f"[{part.type} not shown]"
