"""OpenEnv's `/mcp`: the tools of a served environment over JSON-RPC, with MCP's method names.

`openenv/session/create` and `openenv/session/close` open and close a session by id. `tools/list` and
`tools/call` take its `session_id`; without one they use the server's shared session. A call is a step of the
session's episode, with the rewards and limits of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

from agentenv.core import AgentEnvError, UsageError
from agentenv_openenv.sessions import EnvSession, Sessions

__all__ = ["answer_rpc"]

_log = logging.getLogger(__name__)
_INVALID_REQUEST, _NO_METHOD, _INVALID_PARAMS, _INTERNAL = -32600, -32601, -32602, -32603


async def answer_rpc(request: object, sessions: Sessions, default: EnvSession) -> dict[str, Any]:
    """Answer one JSON-RPC request.

    Args:
        request: the parsed request.
        sessions: sessions of the server.
        default: session of requests that name no session.
    """
    asked = cast("Mapping[str, Any]", request) if isinstance(request, Mapping) else {}
    id, method, params = asked.get("id"), asked.get("method"), asked.get("params", {})
    if asked.get("jsonrpc") != "2.0" or not isinstance(method, str):
        return _failed(id, _INVALID_REQUEST, "a request must have jsonrpc 2.0 and a method")
    if not isinstance(params, Mapping):
        return _failed(id, _INVALID_PARAMS, "params must be an object")
    try:
        result = await _done(method, cast("Mapping[str, Any]", params), sessions, default)
    except UsageError as error:
        return _failed(id, _INVALID_PARAMS, str(error))
    except Exception as error:  # noqa: BLE001 - reported to the client
        if not isinstance(error, AgentEnvError):
            _log.exception("the environment raised")
        return _failed(id, _INTERNAL, f"{type(error).__name__}: {error}")
    if result is None:
        return _failed(id, _NO_METHOD, f"there is no method {method!r:.80}")
    return {"jsonrpc": "2.0", "id": id, "result": result}


async def _done(
    method: str, params: Mapping[str, Any], sessions: Sessions, default: EnvSession
) -> dict[str, Any] | None:
    """Execute a request and return its result; None if there is no such method."""
    named = params.get("session_id")
    if method == "openenv/session/create":
        return {"session_id": await sessions.open()}
    if method == "openenv/session/close":
        await sessions.close(str(named))
        return {"session_id": named, "closed": True}
    session = default if named is None else sessions[str(named)]
    if method == "tools/list":
        renamed = {"input_schema": "inputSchema"}
        tools = await session.tools()
        return {"tools": [{renamed.get(key, key): tool[key] for key in tool} for tool in tools]}
    if method == "tools/call":
        return await _call(session, params)
    return None


async def _call(session: EnvSession, params: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = params.get("name"), params.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise UsageError("tools/call needs a name, and arguments as an object")
    step = await session.step({"type": "call_tool", "tool_name": name, "arguments": arguments})
    error = step["observation"].get("error")
    if error is not None:
        raise UsageError(str(error["message"]))
    text = step["observation"].get("result")
    return {
        "content": [{"type": "text", "text": text}],
        "isError": False,
        "data": text,
        "reward": step["reward"],
        "done": step["done"],
    }


def _failed(id: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}}
