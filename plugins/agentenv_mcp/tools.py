"""Use the tools of an MCP server as tools of an environment.

1. The model sees the server's own schemas. Names that providers refuse are changed, and the description then
   gives the server's own.
2. What the server reports as an error is shown to the model. A connection that breaks is made again once, and
   the call repeated; if that fails too, the episode is aborted.
3. Results are whole: text, pictures, structured content, embedded text, and links with their addresses. What
   a chat message cannot hold, such as sound, is named in words.

MCP has no reset and no seeds. If a server keeps state, all episodes that use its tools share that state.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import tempfile
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from agentenv.core import DependencyMissing, ServerUnavailable, ToolError, UsageError
from agentenv.tools import Image, Tool
from agentenv_mcp.connection import Connection, dialer

__all__ = ["mcp_tools"]

MAX_TOOLS = 10_000
_MAX_NAME = 64


@asynccontextmanager
async def mcp_tools(
    server: Any,
    *,
    only: Collection[str] | None = None,
    prefix: str = "",
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    headers: Mapping[str, str] | None = None,
    roots: Sequence[str | Path] = (),
    timeout_s: float | None = 30.0,
    reconnect: bool = True,
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
        prefix: text before each name, where tools of several servers have the same names.
        env: environment variables of a command; besides these it gets PATH, HOME and a few others.
        cwd: directory in which a command runs.
        headers: HTTP headers of each request to a URL, such as a key.
        roots: directories, or `file://` addresses, that the server may use; MCP calls them roots.
        timeout_s: time limit of the connection, of the list of tools, and of one call.
        reconnect: connect once more when the connection breaks. Choose False for a server that keeps an
            episode's state, because a new one would not have it.

    Raises:
        DependencyMissing: The package mcp is not installed.
        ServerUnavailable: The server cannot be reached, or does not answer in time.
        UsageError: The server's program does not exist, an argument or a name in `only` does not fit, or the
            list of tools cannot be read.
    """
    DependencyMissing.require("mcp", "mcp_types", extra="mcp", purpose="connecting to an MCP server")
    with tempfile.TemporaryFile() as log:
        dial = dialer(server, log, env=env, cwd=cwd, headers=headers, roots=roots)
        connection = Connection(dial, log, timeout_s, attempts=2 if reconnect else 1)
        try:
            yield await _tools_of(connection, only, prefix, timeout_s)
        finally:
            await connection.close()


async def _tools_of(
    connection: Connection, only: Collection[str] | None, prefix: str, timeout_s: float | None
) -> list[Tool[..., Any]]:
    await connection.linked()
    try:
        async with asyncio.timeout(timeout_s):
            offered = await connection.ask(_listed)
    except TimeoutError:
        raise ServerUnavailable(f"the MCP server did not list its tools within {timeout_s:g} s") from None
    except (ServerUnavailable, UsageError):
        raise
    except Exception as error:  # such as schemas that are none
        raise UsageError(f"the MCP server's list of tools cannot be read: {error}") from error
    names = _names_for_the_model([tool.name for tool in offered], prefix)
    missing = set(only or ()) - names.keys() - set(names.values())
    if missing:
        raise UsageError(f"the MCP server has no tool {min(missing)!r}", remedy=f"it has: {', '.join(names)}")
    return [
        _tool(connection, tool, names[tool.name], timeout_s)
        for tool in offered
        if only is None or tool.name in only or names[tool.name] in only
    ]


async def _listed(client: Any) -> list[Any]:
    tools: dict[str, Any] = {}
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools.update({tool.name: tool for tool in page.tools})
        if len(tools) > MAX_TOOLS or page.next_cursor == cursor is not None:
            raise UsageError(
                f"the MCP server lists more than {MAX_TOOLS:,} tools, or one page again and again"
            )
        cursor = page.next_cursor
        if not cursor:
            return list(tools.values())


def _names_for_the_model(own: Iterable[str], prefix: str) -> dict[str, str]:
    """Return a name for each name of the server, as providers accept it and each only once."""
    plain = {name: re.sub(r"[^a-zA-Z0-9_-]", "_", prefix + name) for name in own}
    unchanged = {name for name, told in plain.items() if told == prefix + name}
    names: dict[str, str] = {}
    for name, told in plain.items():
        taken = name not in unchanged and (told in names.values() or told.removeprefix(prefix) in unchanged)
        shorter = f"{told[: _MAX_NAME - 9]}_{blake2b(name.encode(), digest_size=4).hexdigest()}"
        names[name] = shorter if taken or not 0 < len(told) <= _MAX_NAME else told
    return names


def _tool(connection: Connection, offered: Any, name: str, timeout_s: float | None) -> Tool[..., Any]:
    async def call(**arguments: Any) -> Any:
        answer = await connection.ask(partial(_called, name=offered.name, arguments=arguments))
        parts = _parts(answer)
        words = [part for part in parts if isinstance(part, str)]
        told = "\n".join(words) if len(words) == len(parts) else parts
        if answer.is_error:
            raise ToolError(told)
        return told

    own = "" if name == offered.name else f"The server's own name of this tool is {offered.name!r}."
    description = "\n\n".join(filter(None, [offered.description or "", own]))
    return Tool.from_schema(name, description, offered.input_schema, call, timeout_s=timeout_s)


async def _called(client: Any, *, name: str, arguments: Mapping[str, Any]) -> Any:
    return await client.call_tool(name, dict(arguments))


def _parts(answer: Any) -> list[str | Image]:
    """Return all that a result says: its parts, and structured content that no part repeats."""
    parts = [_part(part) for part in answer.content]
    data = answer.structured_content
    if data is None:
        return parts
    told = [_value(part) for part in parts if isinstance(part, str)]
    whole = [part.model_dump(mode="json", by_alias=True, exclude_none=True) for part in answer.content]
    # Servers wrap a result that is no object, and write a list as one part for each entry.
    meant = [data, *(data.values() if len(data) == 1 else ())]
    if parts and any(value in (told, whole) or value in told for value in meant):
        return parts
    return [*parts, json.dumps(data, ensure_ascii=False)]


def _value(text: str) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text


def _part(part: Any) -> str | Image:
    if part.type == "text":
        return str(part.text)
    if part.type == "image":
        return Image(base64.b64decode(part.data), part.mime_type)
    if part.type == "resource_link":
        about = f": {part.description}" if part.description else ""
        return f"[{part.title or part.name}]({part.uri}){about}"
    if part.type == "resource":
        inner = part.resource
        if (text := getattr(inner, "text", None)) is not None:
            return f"[{inner.uri}]\n{text}"
        data, kind = base64.b64decode(inner.blob), inner.mime_type or "unknown type"
        if kind.startswith("image/"):
            return Image(data, kind)
        with suppress(UnicodeDecodeError):
            if kind.startswith("text/"):
                return f"[{inner.uri}]\n{data.decode()}"
        return f"[{inner.uri} is not shown: a chat message holds no {kind}]"
    return f"[{part.type} is not shown: a chat message holds no {getattr(part, 'mime_type', part.type)}]"
