"""Serve an environment in OpenEnv's protocol, so that OpenEnv's clients play it.

1. Each WebSocket at `/ws` is a session with an environment of its own. `/reset`, `/step` and
   `/state` over plain HTTP share one more session.
2. An action is the model's message (`{"content": ..., "tool_calls": [...]}`), or OpenEnv's
   `{"type": "call_tool", "tool_name": ..., "arguments": {...}}` and `{"type": "list_tools"}`.
3. An observation holds `messages`, new ones only; that of a reset holds `tools`, too. The answer to
   `call_tool` holds `tool_name`, `result` and `error`.
4. `reset` takes `seed`, and `task_id` or `task` with `split`. A seed and a task give one episode.
5. The specification's turn limit holds. The reward of the end is added to the last step's.

Not served: a simulated user, whose turns are the runner's, and token ids: OpenEnv's protocol has text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import WSMsgType, web

from agentenv.context import Context
from agentenv.env import Env
from agentenv.errors import AgentEnvError, UsageError
from agentenv.messages import Message
from agentenv.observations import action_message
from agentenv.registry import EnvSpec, spec
from agentenv.seeding import derive_seed

__all__ = ["OpenEnvServer", "Session", "serve", "serve_forever"]

_log = logging.getLogger(__name__)
_MAX_MESSAGE_BYTES = 100 << 20
_ACTION: dict[str, Any] = {
    "title": "Action",
    "type": "object",
    "description": "The model's message, or a call_tool or list_tools action.",
    "properties": {
        "content": {"type": "string", "description": "The message's text."},
        "tool_calls": {
            "type": "array",
            "items": {"type": "object"},
            "description": "Calls in OpenAI's shape.",
        },
        "type": {"type": "string", "enum": ["call_tool", "list_tools"]},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
        "metadata": {"type": "object"},
    },
}
_OBSERVATION: dict[str, Any] = {
    "title": "Observation",
    "type": "object",
    "properties": {
        "messages": {"type": "array", "items": {"type": "object"}, "description": "New chat messages."},
        "tools": {"type": "array", "items": {"type": "object"}, "description": "The tools' schemas."},
        "done": {"type": "boolean"},
        "reward": {"type": ["number", "null"]},
        "metadata": {"type": "object"},
    },
}
_STATE: dict[str, Any] = {
    "title": "State",
    "type": "object",
    "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}},
}


class Session:
    """One client's environment."""

    def __init__(self, entry: EnvSpec) -> None:
        self._entry = entry
        self._env: Env | None = None
        self._lock = asyncio.Lock()
        self._turns = 0
        self._calls = 0
        self._done = True
        self._episode_id: str | None = None
        self._task_id = ""

    @property
    def state(self) -> dict[str, Any]:
        """OpenEnv's state."""
        return {
            "episode_id": self._episode_id,
            "step_count": self._turns,
            "env_id": self._entry.id,
            "task_id": self._task_id,
            "done": self._done,
        }

    async def reset(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Start an episode and return its first observation.

        Raises:
            UsageError: The seed is no number, or the task is no object.
        """
        async with self._lock:
            seed = asked.get("seed")
            if seed is None:
                seed = uuid.uuid4().int % 2**31
            if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
                raise UsageError(f"a seed is a whole number from 0, not {seed!r:.100}")
            self._task_id, task = self._task(asked, seed)
            await self._close()
            self._env = self._entry.make()
            self._episode_id = str(asked.get("episode_id") or uuid.uuid4())
            context = Context(episode_id=self._episode_id, seed=seed)
            self._turns = self._calls = 0
            begun = await self._env.begin(task, seed=seed, context=context)
            self._done = False
            seen = {"messages": list(begun.messages), "tools": [dict(one) for one in self._env.tool_schemas]}
            return _answer(seen, None, done=False, metadata={"task_id": self._task_id, "seed": seed})

    async def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Play one action.

        Raises:
            UsageError: The action has no known shape, or no episode is being played.
        """
        async with self._lock:
            kind = action.get("type")
            if kind == "list_tools":
                return _answer({"tools": self._tools()}, None, done=self._done and self._turns > 0)
            if self._env is None or self._done:
                raise UsageError("there is no episode to step; send reset first")
            message = self._message(action)
            result = await self._env.advance(message)
            self._turns += 1
            reason = await self._reason(message, result.terminated, result.truncated)
            reward: float | None = result.reward
            metadata: dict[str, Any] = {}
            if reason:
                self._done = True
                outcome = await self._env.end(reason)
                reward = None if outcome.reward is None else result.reward + outcome.reward
                metadata = {"stop_reason": reason, "rewards": dict(outcome.rewards)}
            if kind == "call_tool":
                seen = self._tool_answer(action, result.tool_results[0]) if result.tool_results else {}
            else:
                said = [one.to_message() for one in result.tool_results]
                seen = {"messages": [*said, *result.messages]}
            return _answer(seen, reward, done=self._done, metadata=metadata)

    async def close(self) -> None:
        """Free the environment."""
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        env, self._env, self._done = self._env, None, True
        if env is not None:
            await env.shutdown()

    def _task(self, asked: Mapping[str, Any], seed: int) -> tuple[str, Mapping[str, object]]:
        given = asked.get("task")
        if given is not None:
            if not isinstance(given, Mapping):
                raise UsageError(f"a task is an object with the task's fields, not {given!r:.100}")
            return str(given.get("id", "given")), given
        split = asked.get("split")
        tasks = self._entry.task_set(None if split is None else str(split))
        if asked.get("task_id") is not None:
            task = tasks[str(asked["task_id"])]
        else:
            task = next(iter(tasks.shuffle(seed=derive_seed("openenv", seed))))
        return task.id, task.data

    def _tools(self) -> list[dict[str, Any]]:
        env = self._env if self._env is not None else self._entry.make()
        found: list[dict[str, Any]] = []
        for schema in env.tool_schemas:
            function: Any = schema["function"]
            found.append(
                {
                    "name": function["name"],
                    "description": function.get("description", ""),
                    "input_schema": function.get("parameters", {}),
                }
            )
        return found

    def _message(self, action: Mapping[str, Any]) -> Message:
        if action.get("type") == "call_tool":
            self._calls += 1
            arguments = json.dumps(action.get("arguments") or {})
            function = {"name": str(action.get("tool_name", "")), "arguments": arguments}
            calls = [{"id": f"call_{self._calls}", "type": "function", "function": function}]
            return action_message({"role": "assistant", "content": None, "tool_calls": calls})
        if not isinstance(action.get("content"), str) and not action.get("tool_calls"):
            raise UsageError(
                "an action has content (text), tool_calls, or the type call_tool or list_tools; "
                f"this has: {', '.join(map(str, action)) or 'nothing'}"
            )
        fields = {name: action[name] for name in ("content", "tool_calls") if action.get(name) is not None}
        return action_message({"role": "assistant", "content": None, **fields})

    async def _reason(self, message: Message, terminated: bool, truncated: bool) -> str:
        assert self._env is not None
        if terminated:
            return "env_terminated"
        if truncated:
            return "env_truncated"
        if await self._env.is_finished():
            return "env_done"
        if self._env.ends_on_text and not message.get("tool_calls"):
            return "final_answer"
        limit = self._entry.max_turns
        return "max_turns" if limit is not None and self._turns >= limit else ""

    @staticmethod
    def _tool_answer(action: Mapping[str, Any], result: Any) -> dict[str, Any]:
        error = {"error_type": "execution_error", "message": result.text} if result.is_error else None
        told = None if result.is_error else result.text
        return {"tool_name": str(action.get("tool_name", "")), "result": told, "error": error}


class OpenEnvServer:
    """The protocol over one environment.

    Args:
        env: id, file or specification of the environment.
        max_sessions: WebSockets at once.

    Raises:
        UsageError: The environment has a simulated user.
    """

    def __init__(self, env: str | EnvSpec, *, max_sessions: int = 64) -> None:
        self.entry = spec(env)
        if self.entry.user is not None:
            raise UsageError(f"{self.entry.id} has a simulated user, whose turns OpenEnv's protocol lacks")
        self._max_sessions = max_sessions
        self._open: set[web.WebSocketResponse] = set()
        self._shared = Session(self.entry)

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=_MAX_MESSAGE_BYTES)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metadata", self._metadata),
                web.get("/schema", self._schema),
                web.get("/state", self._state),
                web.post("/reset", self._reset),
                web.post("/step", self._step),
                web.get("/ws", self._socket),
            ]
        )
        app.on_shutdown.append(self._stop)
        return app

    async def _stop(self, app: web.Application) -> None:
        for socket in list(self._open):
            await socket.close()
        await self._shared.close()

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def _metadata(self, request: web.Request) -> web.Response:
        told = {"name": self.entry.id, "description": self.entry.description or self.entry.id}
        return web.json_response({**told, "version": self.entry.id.rpartition("-v")[2]})

    async def _schema(self, request: web.Request) -> web.Response:
        return web.json_response({"action": _ACTION, "observation": _OBSERVATION, "state": _STATE})

    async def _state(self, request: web.Request) -> web.Response:
        return web.json_response(self._shared.state)

    async def _reset(self, request: web.Request) -> web.Response:
        asked = await _body(request) if request.can_read_body else {}
        return await _plain(self._shared.reset(asked))

    async def _step(self, request: web.Request) -> web.Response:
        action = (await _body(request)).get("action")
        if not isinstance(action, dict):
            return web.json_response({"detail": "the body is an object with an action"}, status=422)
        return await _plain(self._shared.step(action))

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=_MAX_MESSAGE_BYTES, heartbeat=30.0)
        await socket.prepare(request)
        if len(self._open) >= self._max_sessions:
            full = f"all {self._max_sessions} sessions are taken"
            await socket.send_json(_error(full, "CAPACITY_REACHED"))
            await socket.close()
            return socket
        self._open.add(socket)
        session = Session(self.entry)
        try:
            async for frame in socket:
                if frame.type is not WSMsgType.TEXT:
                    continue
                answer = await _reply(session, frame.data)
                if answer is None:
                    break
                await socket.send_json(answer)
        finally:
            self._open.discard(socket)
            await session.close()
        await socket.close()
        return socket


async def _reply(session: Session, text: str) -> dict[str, Any] | None:
    """Return the answer to one message of a socket; None to close it."""
    try:
        message = json.loads(text)
    except ValueError as error:
        return _error(f"Invalid JSON: {error}", "INVALID_JSON")
    kind = message.get("type") if isinstance(message, dict) else None
    data = message.get("data", {}) if isinstance(message, dict) else {}
    if not isinstance(data, dict):
        return _error("data must be an object", "VALIDATION_ERROR")
    try:
        if kind == "reset":
            return {"type": "observation", "data": await session.reset(data)}
        if kind == "step":
            return {"type": "observation", "data": await session.step(data)}
    except UsageError as error:
        return _error(str(error), "VALIDATION_ERROR")
    except Exception as error:  # noqa: BLE001 - told to the client
        # One environment's failure is told to its client; the others play on.
        if not isinstance(error, AgentEnvError):
            _log.exception("the environment raised")
        return _error(f"{type(error).__name__}: {error}", "EXECUTION_ERROR")
    if kind == "state":
        return {"type": "state", "data": session.state}
    return None if kind == "close" else _error(f"Unknown message type: {kind}", "UNKNOWN_TYPE")


async def _plain(answer: Any) -> web.Response:
    try:
        return web.json_response(await answer)
    except UsageError as error:
        return web.json_response({"detail": str(error)}, status=422)
    except Exception as error:  # noqa: BLE001 - told to the client
        _log.exception("the environment raised")
        return web.json_response({"detail": f"{type(error).__name__}: {error}"}, status=500)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise web.HTTPUnprocessableEntity(
            text=json.dumps({"detail": "the body must be a JSON object"}), content_type="application/json"
        )
    return body


def _answer(
    seen: dict[str, Any], reward: float | None, *, done: bool, metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return an observation in the shape that OpenEnv's clients parse."""
    told = metadata or {}
    return {"observation": {**seen, "metadata": told}, "reward": reward, "done": done, "metadata": told}


def _error(message: str, code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


@asynccontextmanager
async def serve(
    env: str | EnvSpec, *, host: str = "127.0.0.1", port: int = 0, max_sessions: int = 64
) -> AsyncGenerator[str]:
    """Serve an environment for the time of a block; yields the address.

    Raises:
        UnknownEnvironment: Nothing has this name.
        UsageError: The environment has a simulated user.
        OSError: The port is taken.
    """
    runner = web.AppRunner(OpenEnvServer(env, max_sessions=max_sessions).app(), shutdown_timeout=2.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        address = runner.addresses[0]
        yield f"http://{address[0]}:{address[1]}"
    finally:
        await runner.cleanup()


async def serve_forever(
    env: str | EnvSpec, *, host: str, port: int, max_sessions: int, said: Callable[[str], None]
) -> None:
    """Serve until cancelled: what `agentenv serve --env` does.

    Raises:
        UsageError: The port cannot be had, or the environment cannot be served.
    """
    try:
        async with serve(env, host=host, port=port, max_sessions=max_sessions) as address:
            said(f"serving {spec(env).id} in OpenEnv's protocol at {address}")
            await asyncio.Event().wait()
    except OSError as error:
        raise UsageError(
            f"the server cannot listen at {host}:{port}: {error}; choose another --port"
        ) from error
