"""Environments of OpenEnv, on a server (`openenv:http://HOST:PORT`) or as objects of this process.

1. If the environment is an MCP environment, its tools are the model's tools. Any other environment has one
   tool, `act`, whose arguments are the fields of the environment's action. Observations are shown as JSON and
   rewards are those of the steps. The episode ends when the environment reports `done`, and also with a
   message without a call.
2. The fields of a task are arguments of `reset`. Tasks are those of the server, or else seeds.
3. A server that breaks off, does not answer or fails aborts the episode. What it refuses in an action is told
   to the model. A server that has no free session is waited for.

OpenEnv has no token ids and does not distinguish terminated from truncated, and an environment may ignore
seeds.

If the environment variable OPENENV_TOKEN is set, servers get it as a bearer token. `agentenv serve --env` and
private Spaces of Hugging Face need one.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from agentenv.core import EnvironmentMisuse, ServerUnavailable, TaskError, ToolError, UsageError, off_loop
from agentenv.envs import ToolEnv
from agentenv.tools import Tool

__all__ = ["OpenEnv"]

_NOT_SHOWN = frozenset({"done", "reward", "metadata"})
_TIMEOUT_S = 120.0
_LOOK_AGAIN_S = 0.5
"""Seconds between two looks whether a server has a free session."""
_REFUSALS = frozenset({"VALIDATION_ERROR", "INVALID_JSON", "UNKNOWN_TYPE"})
"""Codes of errors that are about what was sent."""


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

    async def start(self, seed: int, **options: Any) -> str:
        """Reset the environment with the fields of the task, and return its first observation as text."""
        options.pop("id", None)
        limit_s = self.context.limits.env_timeout_s
        # The wait for a session ends before the time limit of the environment, which names no remedy.
        wait_s = _TIMEOUT_S if limit_s is None else 0.8 * limit_s
        first = await self._link.reset({"seed": int(seed) % 2**31, **options}, wait_s)
        self._done = bool(first.get("done"))
        offered = await self._link.tools()
        self.tools = tuple(self._tool(tool) for tool in offered)
        return _told(first) or "Begin."

    def reward(self) -> float:
        """Return 0, because the rewards are those of the steps."""
        return 0.0

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

    async def reset(self, options: Mapping[str, Any], wait_s: float) -> dict[str, Any]:
        until = time.monotonic() + wait_s
        while True:
            await self._connect()
            try:
                return await self._ask({"type": "reset", "data": dict(options)})
            except ToolError as error:
                raise TaskError(f"the OpenEnv server at {self._url} refused {options}: {error}") from error
            except _Full as full:
                await self.close()
                if time.monotonic() + _LOOK_AGAIN_S > until:
                    raise ServerUnavailable(
                        f"the OpenEnv server at {self._url} had no free session for {wait_s:g} s: {full}",
                        remedy="let it play more episodes at once (max_concurrent_envs), or play fewer with "
                        f"-o runner.concurrency={full.sessions or 1}",
                    ) from None
                await asyncio.sleep(_LOOK_AGAIN_S)

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
            except (ToolError, _Failed, KeyError):
                # This is not an MCP environment, so its action is the only tool.
                self._tools = [_act(await self._schema())]
        return self._tools

    async def _schema(self) -> Any:
        import aiohttp

        try:
            async with self._http.get(f"{self._url}/schema", raise_for_status=True) as response:
                return (await response.json())["action"]
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            raise ServerUnavailable(
                f"the OpenEnv server at {self._url} does not tell the schema of its action: {error!r}"
            ) from error

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
            wrong = 400 <= error.status < 500
            raise (EnvironmentMisuse if wrong else ServerUnavailable)(
                f"the OpenEnv server at {self._url} refused the connection with status {error.status}",
                remedy="set OPENENV_TOKEN to the token that the server printed"
                if error.status == 401
                else "check the URL",
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            await self.close()
            raise ServerUnavailable(f"the OpenEnv server at {self._url} does not answer: {error}") from error

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of the server's answer.

        Raises:
            ToolError: The server refused what was sent.
            ServerUnavailable: The connection broke off, or the server failed.
            _Full: The server has no free session.
        """
        if self._socket is None:
            raise ServerUnavailable(f"the connection to the OpenEnv server at {self._url} broke off before")
        try:
            with suppress(ConnectionError):  # a server that hangs up may have said why
                await self._socket.send_json(message)
            answer = await self._socket.receive_json(timeout=_TIMEOUT_S)
        except (TypeError, ValueError, ConnectionError, TimeoutError) as error:
            await self.close()
            raise ServerUnavailable(
                f"the connection to the OpenEnv server at {self._url} broke off: {error!r}"
            ) from error
        if answer.get("type") != "error":
            return answer["data"]
        details = answer.get("data") or {}
        code, told = details.get("code"), str(details.get("message"))
        if code in _REFUSALS:
            raise ToolError(f"{told}: {details['errors']}" if details.get("errors") else told)
        if code == "CAPACITY_REACHED":
            raise _Full(told, details.get("max_sessions"))
        raise _Failed(f"the OpenEnv server at {self._url} reported an error: {told} ({code})")


class _Failed(ServerUnavailable):
    """The server's environment raised an exception; the connection goes on."""


class _Full(Exception):
    """The server has no free session."""

    def __init__(self, told: str, sessions: int | None = None) -> None:
        super().__init__(told)
        self.sessions = sessions


class _Local:
    """An environment object of this process."""

    def __init__(self, inner: Any, action: type[Any] | None) -> None:
        self._inner = inner
        self._action = action
        self._is_mcp = action is None

    async def reset(self, options: Mapping[str, Any], wait_s: float) -> dict[str, Any]:
        parameters = inspect.signature(self._inner.reset).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            unknown = options.keys() - parameters.keys() - {"seed"}
            if unknown:
                where = f"reset() of {type(self._inner).__name__}"
                raise TaskError(f"the task has the field {min(unknown)!r}, which {where} does not take")
            options = {name: value for name, value in options.items() if name in parameters}
        return _plain(await off_loop(self._inner.reset, **options))

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
