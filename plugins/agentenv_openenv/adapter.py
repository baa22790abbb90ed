"""Environments of OpenEnv, on a server (`openenv:http://HOST:PORT`) or as objects of this process.

If the environment is an MCP environment, its tools are the model's tools. Any other environment has one
tool, `act`, whose arguments are the fields of the environment's action. Observations are shown as JSON and
rewards are those of the steps. The episode ends when the environment reports `done`, and also with a
message without a call. Tasks are seeds.

OpenEnv has no token ids and does not distinguish terminated from truncated, and an environment may ignore
seeds. The server decides how many episodes it plays at once.

If the environment variable OPENENV_TOKEN is set, servers get it as a bearer token. `agentenv serve --env` and
private Spaces of Hugging Face need one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from agentenv.core import EnvironmentMisuse, ToolError, UsageError, off_loop
from agentenv.envs import ToolEnv
from agentenv.tools import Tool

__all__ = ["OpenEnv"]

_NOT_SHOWN = frozenset({"done", "reward", "metadata"})
_TIMEOUT_S = 120.0


class OpenEnv(ToolEnv):
    """Plays an environment of OpenEnv.

    Args:
        source: URL of a server, or an environment object of this process.
        action: action class of the environment object; leave it out for an MCP environment.
        token: bearer token for the server; None takes it from the environment variable OPENENV_TOKEN.

    Raises:
        UsageError: The source is neither a URL nor an environment object.
    """

    def __init__(self, source: Any, action: type[Any] | None = None, *, token: str | None = None) -> None:
        self._link: _Remote | _Local
        if isinstance(source, str):
            self._link = _Remote(source, os.environ.get("OPENENV_TOKEN", "") if token is None else token)
        elif callable(getattr(source, "reset", None)) and callable(getattr(source, "step", None)):
            self._link = _Local(source, action)
        else:
            raise UsageError(
                f"an OpenEnv environment must be a URL or an object with reset and step, not {source!r:.100}"
            )
        self._done = False

    async def start(self, seed: int) -> str:
        """Reset the environment and return its first observation as text."""
        first = await self._link.reset(int(seed) % 2**31)
        self._done = bool(first.get("done"))
        offered = await self._link.tools()
        self.tools = tuple(self._tool(tool) for tool in offered)
        return _told(first) or "Begin."

    def is_done(self) -> bool:
        """Return whether the environment's last answer reported `done`."""
        return self._done

    async def close(self) -> None:
        """Close the environment, or the connection to it."""
        await self._link.close()

    def _tool(self, offered: Mapping[str, Any]) -> Tool[..., Any]:
        name = str(offered["name"])

        async def call(**arguments: Any) -> str:
            if self._done:
                raise ToolError("the episode is over")
            answer = await self._link.step(name, arguments)
            self._done = bool(answer.get("done"))
            self.add_turn_reward(float(answer.get("reward") or 0.0))
            seen = answer.get("observation") or {}
            if seen.get("error"):
                error = seen["error"]
                raise ToolError(str(error.get("message", error) if isinstance(error, Mapping) else error))
            return _told(answer)

        schema = offered["input_schema"]
        return Tool.from_schema(
            name, str(offered.get("description") or name), schema, call, timeout_s=_TIMEOUT_S
        )


class _Remote:
    """A session with a server through its WebSocket."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http: Any = None
        self._socket: Any = None
        self._tools: list[dict[str, Any]] | None = None

    async def reset(self, seed: int) -> dict[str, Any]:
        await self._connect()
        return await self._ask({"type": "reset", "data": {"seed": seed}})

    async def step(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        action = (
            dict(arguments)
            if name == "act"
            else {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        )
        return await self._ask({"type": "step", "data": action})

    async def tools(self) -> list[dict[str, Any]]:
        if self._tools is None:
            try:
                answer = await self._ask({"type": "step", "data": {"type": "list_tools"}})
                self._tools = list(answer["observation"]["tools"])
            except (EnvironmentMisuse, KeyError):
                # This is not an MCP environment, so its action is the only tool.
                async with self._http.get(f"{self._url}/schema") as response:
                    self._tools = [_act((await response.json())["action"])]
        return self._tools

    async def close(self) -> None:
        http, socket, self._http, self._socket = self._http, self._socket, None, None
        if socket is not None:
            await socket.close()
        if http is not None:
            await http.close()

    async def _connect(self) -> None:
        if self._socket is not None and not self._socket.closed:
            return
        import aiohttp

        await self.close()
        self._http = aiohttp.ClientSession(headers=self._headers)
        try:
            self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=100 << 20)
        except aiohttp.WSServerHandshakeError as error:
            await self.close()
            raise EnvironmentMisuse(
                f"the OpenEnv server at {self._url} refused the connection with status {error.status}",
                remedy="set OPENENV_TOKEN to the token that the server printed"
                if error.status == 401
                else "check the URL",
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            await self.close()
            raise EnvironmentMisuse(f"the OpenEnv server at {self._url} does not answer: {error}") from error

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            await self._socket.send_json(message)
            answer = await self._socket.receive_json(timeout=_TIMEOUT_S)
        except (TypeError, ValueError, ConnectionError, TimeoutError) as error:
            await self.close()
            raise EnvironmentMisuse(
                f"the connection to the OpenEnv server at {self._url} broke off: {error}"
            ) from error
        if answer.get("type") == "error":
            details = answer.get("data", {})
            raise EnvironmentMisuse(
                f"the OpenEnv server at {self._url} reported an error: "
                f"{details.get('message')} ({details.get('code')})"
            )
        return answer["data"]


class _Local:
    """An environment object of this process."""

    def __init__(self, inner: Any, action: type[Any] | None) -> None:
        self._inner = inner
        self._action = action
        self._is_mcp = action is None

    async def reset(self, seed: int) -> dict[str, Any]:
        return _plain(await off_loop(self._inner.reset, seed=seed))

    async def step(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if self._action is not None:
            return _plain(await off_loop(self._inner.step, self._action(**arguments)))
        from openenv.core.env_server.mcp_types import CallToolAction

        action = CallToolAction(tool_name=name, arguments=dict(arguments))
        return _plain(await off_loop(self._inner.step, action))

    async def tools(self) -> list[dict[str, Any]]:
        if self._action is not None:
            return [_act(self._action.model_json_schema())]
        from openenv.core.env_server.mcp_types import ListToolsAction

        answer = _plain(await off_loop(self._inner.step, ListToolsAction()))
        return list(answer["observation"].get("tools", []))

    async def close(self) -> None:
        await off_loop(self._inner.close)


def _act(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool `act`, whose arguments are the fields of an action's schema."""
    properties = schema.get("properties", {}).items()
    fields = {name: field for name, field in properties if name not in _NOT_SHOWN}
    required = [name for name in schema.get("required", []) if name in fields]
    shown = {"type": "object", "properties": fields, "required": required}
    if "$defs" in schema:
        shown["$defs"] = schema["$defs"]
    return {"name": "act", "description": schema.get("description") or "Act.", "input_schema": shown}


def _plain(observation: Any) -> dict[str, Any]:
    """Return an observation object in the format that a server sends."""
    seen = observation.model_dump(mode="json", exclude={"done", "reward"})
    return {"observation": seen, "reward": observation.reward, "done": observation.done}


def _told(answer: Mapping[str, Any]) -> str:
    """Return an observation as text: text unchanged, anything else as JSON."""
    seen = {
        name: value
        for name, value in (answer.get("observation") or {}).items()
        if name not in _NOT_SHOWN | {"tools", "tool_name", "error"} and value is not None
    }
    if set(seen) == {"result"}:
        result: Any = seen["result"]
        if isinstance(result, Mapping) and isinstance(result.get("data"), str | int | float):
            result = result["data"]
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    if set(seen) == {"messages"} and all(isinstance(part.get("content"), str) for part in seen["messages"]):
        return "\n\n".join(message["content"] for message in seen["messages"])
    return json.dumps(seen, ensure_ascii=False) if seen else ""
