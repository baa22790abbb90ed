"""Serve an environment in OpenEnv's protocol, so that OpenEnv's clients can play it.

1. Each WebSocket at `/ws` is a session with its own environment. `/reset`, `/step` and `/state` over plain
   HTTP share one further session.
2. An action is the model's message (`{"content": ..., "tool_calls": [...]}`), or OpenEnv's
   `{"type": "call_tool", "tool_name": ..., "arguments": {...}}` or `{"type": "list_tools"}`.
3. An observation contains the new `messages`; the observation of a reset also contains `tools`. The answer
   to `call_tool` contains `tool_name`, `result` and `error`.
4. `reset` takes `seed`, and `task_id` or `task` with `split`. The same seed and task give the same episode.
5. The specification's turn limit applies. The reward at the end is added to the reward of the last step.
6. `/mcp` lists and calls the tools with MCP's methods, for the session that `/ws?session_id=...` plays.
7. Every request but `/health` needs the server's token (see `agentenv.core.serving.Guard`), which OpenEnv's
   clients send with `headers=`. A session without a message for `idle_s` seconds ends, and a session without
   an episode makes room for a new one.

Environments with a simulated user cannot be served, because the runner plays the user's turns. Token ids are
not served, because OpenEnv's protocol transports text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiohttp import WSMessage, WSMsgType, web

from agentenv.core import AgentEnvError, UsageError
from agentenv.core.serving import Guard, Served, guarded, listen, parse_json, read_object
from agentenv.envs import EnvSpec, spec
from agentenv_openenv.mcp import answer_rpc
from agentenv_openenv.sessions import EnvSession, Sessions

__all__ = ["OpenEnvServer", "serve", "serve_forever"]

_log = logging.getLogger(__name__)
_ENDS = (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR)
_MAX_MESSAGE_BYTES = 16 << 20
_HEARTBEAT_S = 30.0
_FAREWELL_S = 2.0
"""Time that a client has to confirm that its socket closes."""
IDLE_S = 1800.0
"""Seconds without a message after which a session ends; a model may think or train for minutes in between."""
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


class OpenEnvServer:
    """Serves one environment in OpenEnv's protocol.

    Args:
        env: id, file or specification of the environment.
        guard: rules for whom the server answers; None makes a new token, which `guard.token` contains.
        max_sessions: limit of sessions that are open at once.
        idle_s: seconds without a message after which a session ends.

    Raises:
        UsageError: The environment has a simulated user.
    """

    def __init__(
        self,
        env: str | EnvSpec,
        *,
        guard: Guard | None = None,
        max_sessions: int = 64,
        idle_s: float = IDLE_S,
    ) -> None:
        self.entry = spec(env)
        if self.entry.user is not None:
            raise UsageError(f"{self.entry.id} has a simulated user, which OpenEnv's protocol cannot serve")
        self.guard = guard or Guard()
        self._idle_s = idle_s
        self._sessions = Sessions(self.entry, max_sessions, idle_s)
        self._sockets: dict[str, web.WebSocketResponse] = {}
        self._shared = EnvSession(self.entry)

    def app(self) -> web.Application:
        """Return the aiohttp application of the server."""
        app = web.Application(client_max_size=_MAX_MESSAGE_BYTES, middlewares=[guarded(self.guard)])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metadata", self._metadata),
                web.get("/schema", self._schema),
                web.get("/state", self._state),
                web.post("/reset", self._reset),
                web.post("/step", self._step),
                web.post("/mcp", self._mcp),
                web.get("/ws", self._socket),
            ]
        )
        app.on_shutdown.append(self._stop)
        return app

    async def _stop(self, app: web.Application) -> None:
        for socket in list(self._sockets.values()):
            await socket.close()
        await self._sessions.close_all()
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
        asked = await read_object(request) if request.can_read_body else {}
        return await _plain(self._shared.reset(asked))

    async def _step(self, request: web.Request) -> web.Response:
        action = (await read_object(request)).get("action")
        if not isinstance(action, dict):
            raise UsageError("the body must be an object with an action")
        return await _plain(self._shared.step(action))

    async def _mcp(self, request: web.Request) -> web.Response:
        return web.json_response(await answer_rpc(await read_object(request), self._sessions, self._shared))

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(
            timeout=_FAREWELL_S, max_msg_size=_MAX_MESSAGE_BYTES, heartbeat=_HEARTBEAT_S
        )
        await socket.prepare(request)
        # After this line nothing may be raised: the connection is no longer one of HTTP.
        with suppress(ConnectionError):
            await self._attend(socket, request.query.get("session_id"))
            await socket.close()
        return socket

    async def _attend(self, socket: web.WebSocketResponse, given: str | None) -> None:
        """Play a socket's session until the socket or the session ends."""
        try:
            id = given or await self._sessions.open()
            session = self._sessions.attach(id, socket.close)
        except UsageError as error:
            await socket.send_json(_error(str(error), "SESSION_ERROR" if given else "CAPACITY_REACHED"))
            return
        self._sockets[id] = socket
        try:
            await self._play(socket, session)
        finally:
            del self._sockets[id]
            self._sessions.detach(id)
            if not given:
                with suppress(UsageError):  # closed already: it made room, or the whole server stops
                    await self._sessions.close(id)

    async def _play(self, socket: web.WebSocketResponse, session: EnvSession) -> None:
        """Answer a socket's messages until it closes or sends none for too long."""
        while True:
            try:
                frame: WSMessage = await socket.receive(self._idle_s)
            except TimeoutError:
                await socket.send_json(_error(f"no message came for {self._idle_s:g} s", "SESSION_ERROR"))
                return
            if frame.type in _ENDS:
                return
            if frame.type is WSMsgType.TEXT:
                answer = await _reply(session, self._sessions, frame.data)
                if answer is None:
                    return
                await socket.send_json(answer)


async def _reply(session: EnvSession, sessions: Sessions, text: str) -> dict[str, Any] | None:
    """Return the answer to one message of a socket; None to close it."""
    session.touch()
    try:
        message = parse_json(text)
    except UsageError as error:
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
        if kind == "mcp":
            return {"type": "mcp", "data": await answer_rpc(data, sessions, session)}
    except UsageError as error:
        return _error(str(error), "VALIDATION_ERROR")
    except Exception as error:  # noqa: BLE001 - reported to the client
        # A failure is reported to the client of this environment; the other sessions continue.
        if not isinstance(error, AgentEnvError):
            _log.exception("the environment raised")
        return _error(f"{type(error).__name__}: {error}", "EXECUTION_ERROR")
    if kind == "state":
        return {"type": "state", "data": session.state}
    return None if kind == "close" else _error(f"Unknown message type: {kind!r:.80}", "UNKNOWN_TYPE")


async def _plain(answer: Awaitable[dict[str, Any]]) -> web.Response:
    try:
        return web.json_response(await answer)
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - told to the client
        # Here, so that the environment's own TimeoutError is not taken for one of the request.
        _log.exception("the environment raised")
        return web.json_response({"detail": f"{type(error).__name__}: {error}"}, status=500)


def _error(message: str, code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


@asynccontextmanager
async def serve(
    env: str | EnvSpec,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    max_sessions: int = 64,
    token: str | None = None,
    allowed_hosts: Sequence[str] = (),
    idle_s: float = IDLE_S,
) -> AsyncGenerator[Served]:
    """Serve an environment while the block runs, and yield the address and the token.

    Args:
        env: id, file or specification of the environment.
        host: address on which the server listens.
        port: port on which the server listens; 0 chooses a free one.
        max_sessions: limit of sessions that are open at once.
        token: token that clients send; None makes a new one, and an empty one lets everyone act who reaches
            the server.
        allowed_hosts: further host names by which clients may reach the server.
        idle_s: seconds without a message after which a session ends.

    Raises:
        UnknownEnvironment: Nothing has this name.
        UsageError: The environment has a simulated user, or other machines could act without a token.
        OSError: The port is in use.
    """
    guard = Guard.of(host, token, allowed_hosts)
    server = OpenEnvServer(env, guard=guard, max_sessions=max_sessions, idle_s=idle_s)
    async with listen(server.app(), guard, port=port) as served:
        yield served


async def serve_forever(
    env: str | EnvSpec, *, host: str, port: int, said: Callable[[str], None], **options: Any
) -> None:
    """Serve until cancelled; the command `agentenv serve --env` calls this.

    Args:
        env: id, file or specification of the environment.
        host: address on which the server listens.
        port: port on which the server listens.
        said: called with the text for the person who started the server.
        options: further options of `serve`.

    Raises:
        UsageError: The server cannot listen on the port, or the environment cannot be served.
    """
    try:
        async with serve(env, host=host, port=port, **options) as served:
            said(f"serving {spec(env).id} in OpenEnv's protocol at {served.url}")
            said(served.how_to_send("OPENENV_TOKEN"))
            await asyncio.Event().wait()
    except OSError as error:
        raise UsageError(
            f"the server cannot listen at {host}:{port}: {error}", remedy="choose another --port"
        ) from error
