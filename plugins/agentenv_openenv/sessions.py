"""Sessions of a server: each plays one client's episodes, in the message formats of OpenEnv's protocol."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from agentenv.core import Action, Context, ToolCall, UsageError, derive_seed
from agentenv.envs import Env, EnvSpec

__all__ = ["EnvSession", "Sessions"]

_GRACE_S = 10.0
"""Time that a new client has to begin an episode before its session may make room for another one."""
_MAX_SEED = 2**63 - 1


class EnvSession:
    """Plays the episodes of one client.

    Args:
        entry: specification of the environment.
        now: clock that says when the session was used, in seconds.
    """

    def __init__(self, entry: EnvSpec, now: Callable[[], float] = time.monotonic) -> None:
        self._entry = entry
        self._now = now
        self.used_at = now()
        """When the client sent its last message."""
        self._env: Env | None = None
        self._lock = asyncio.Lock()
        self._turns = 0
        self._calls = 0
        self._done = True
        self._episode_id: str | None = None
        self._task_id = ""

    @property
    def is_playing(self) -> bool:
        """True while an episode is going on or a message is being answered."""
        return not self._done or self._lock.locked()

    def touch(self) -> None:
        """Note that the client has sent a message."""
        self.used_at = self._now()

    @property
    def state(self) -> dict[str, Any]:
        """State of the session in OpenEnv's format."""
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
            UsageError: The seed is not a whole number from 0, or the environment cannot start the given task.
        """
        async with self._lock:
            seed, episode_id = _seed(asked.get("seed")), _episode_id(asked.get("episode_id"))
            self._task_id, task = self._task(asked, seed)
            await self._close()
            env = self._env = self._entry.make()
            self._episode_id = episode_id
            self._turns = self._calls = 0
            try:
                begun = await env.begin(task, seed=seed, context=Context(episode_id=episode_id, seed=seed))
            except Exception as error:
                if asked.get("task") is None or isinstance(error, UsageError):
                    raise
                # The fields of the task are the client's, so they are the likely cause.
                raise UsageError(
                    f"the environment cannot start the given task: {type(error).__name__}: {error}"
                ) from error
            self._done = False
            seen = {"messages": list(begun.messages), "tools": list(map(dict, env.tool_schemas))}
            return _answer(seen, None, done=False, metadata={"task_id": self._task_id, "seed": seed})

    async def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Play one action.

        Raises:
            UsageError: The action has an unknown format, or no episode is being played.
        """
        async with self._lock:
            kind = action.get("type")
            if kind == "list_tools":
                return _answer({"tools": await self.tools()}, None, done=self._done and self._turns > 0)
            if self._env is None or self._done:
                raise UsageError("there is no episode to step", remedy="send reset first")
            turn = self._turn(action)
            result = await self._env.advance(turn)
            self._turns += 1
            reason = await self._reason(turn, result.terminated, result.truncated)
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
                answers = [answer.to_message() for answer in result.tool_results]
                seen = {"messages": [*answers, *result.messages]}
            return _answer(seen, reward, done=self._done, metadata=metadata)

    async def close(self) -> None:
        """Close the environment."""
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        env, self._env, self._done = self._env, None, True
        if env is not None:
            await env.shutdown()

    def _task(self, asked: Mapping[str, Any], seed: int) -> tuple[str, Mapping[str, object]]:
        task_fields = asked.get("task")
        if task_fields is not None:
            if not isinstance(task_fields, Mapping):
                raise UsageError(f"a task must be an object with the task's fields, not {task_fields!r:.100}")
            return str(task_fields.get("id", "given")), task_fields
        split = asked.get("split")
        tasks = self._entry.task_set(None if split is None else str(split))
        if asked.get("task_id") is not None:
            task = tasks[str(asked["task_id"])]
        else:
            task = next(iter(tasks.shuffle(seed=derive_seed("openenv", seed))))
        return task.id, task.data

    async def tools(self) -> list[dict[str, Any]]:
        """Return the tools, in the format of OpenEnv's observations."""
        env = self._env
        if env is not None:
            return [_tool(schema["function"]) for schema in env.tool_schemas]
        env = self._entry.make()
        try:
            return [_tool(schema["function"]) for schema in env.tool_schemas]
        finally:
            await env.shutdown()

    def _turn(self, action: Mapping[str, Any]) -> Action:
        if action.get("type") == "call_tool":
            self._calls += 1
            arguments = json.dumps(action.get("arguments") or {})
            call = ToolCall(f"call_{self._calls}", str(action.get("tool_name", "")), arguments)
            return Action({"role": "assistant", "content": None}, (call,))
        if not isinstance(action.get("content"), str) and not action.get("tool_calls"):
            raise UsageError(
                f"the action has these fields: {', '.join(map(str, action)) or 'none'}",
                remedy="an action needs content (text), tool_calls, or the type call_tool or list_tools",
            )
        fields = {name: action[name] for name in ("content", "tool_calls") if action.get(name) is not None}
        _check_message(fields)
        return Action.of({"role": "assistant", "content": None, **fields})

    async def _reason(self, turn: Action, terminated: bool, truncated: bool) -> str:
        assert self._env is not None
        if terminated:
            return "env_terminated"
        if truncated:
            return "env_truncated"
        if await self._env.is_finished():
            return "env_done"
        if self._env.ends_on_text and not turn.tool_calls:
            return "final_answer"
        limit = self._entry.max_turns
        return "max_turns" if limit is not None and self._turns >= limit else ""

    @staticmethod
    def _tool_answer(action: Mapping[str, Any], result: Any) -> dict[str, Any]:
        error = {"error_type": "execution_error", "message": result.text} if result.is_error else None
        told = None if result.is_error else result.text
        return {"tool_name": str(action.get("tool_name", "")), "result": told, "error": error}


class Sessions:
    """The sessions of a server. Each belongs to a socket, to a client that opened it by id, or to both.

    Args:
        entry: specification of the environment.
        limit: limit of open sessions. At the limit, a new session closes the one that was unused for the
            longest time, among those without a socket and those whose socket plays no episode.
        idle_s: seconds without a message after which a session that no socket uses is closed.
        now: clock, in seconds.
    """

    def __init__(
        self, entry: EnvSpec, limit: int, idle_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._entry = entry
        self._limit = limit
        self._idle_s = idle_s
        self._now = now
        self._open: dict[str, EnvSession] = {}
        self._attached: dict[str, Callable[[], Awaitable[object]]] = {}
        self._closing: set[asyncio.Future[object]] = set()

    def __getitem__(self, id: str) -> EnvSession:
        """Return an open session.

        Raises:
            UsageError: No session with this id is open.
        """
        if id not in self._open:
            raise UsageError(f"no session {id!r:.80} is open")
        self._open[id].touch()
        return self._open[id]

    async def open(self) -> str:
        """Open a session and return its id.

        Raises:
            UsageError: All sessions are in use by sockets.
        """
        await self._close_unused()
        unused = self._unused() if len(self._open) >= self._limit else ""
        if unused is None:
            raise UsageError(
                f"all {self._limit} sessions are in use", remedy="try again when another has closed"
            )
        id = uuid.uuid4().hex
        self._open[id] = EnvSession(self._entry, self._now)  # first, so that nobody else takes the room
        if unused:
            await self._push_out(unused)
        return id

    def _unused(self) -> str | None:
        """Return the session that makes room for a new one; None if all are in use."""
        early = self._now() - _GRACE_S
        free = [
            (session.used_at, id)
            for id, session in self._open.items()
            if id not in self._attached or (session.used_at <= early and not session.is_playing)
        ]
        return min(free)[1] if free else None

    async def _close_unused(self) -> None:
        """Close the sessions that no socket uses and that had no message for too long."""
        early = self._now() - self._idle_s
        for id, session in list(self._open.items()):
            if id in self._open and id not in self._attached and session.used_at <= early:
                await self.close(id)

    async def _push_out(self, id: str) -> None:
        hang_up = self._attached.pop(id, None)
        if hang_up is not None:
            # The client need not answer, so nobody waits for it.
            closing = asyncio.ensure_future(hang_up())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        await self.close(id)

    def attach(self, id: str, hang_up: Callable[[], Awaitable[object]]) -> EnvSession:
        """Reserve an open session for a socket and return it.

        Args:
            id: id of the session.
            hang_up: called to close the socket if the session makes room for another one.

        Raises:
            UsageError: No session with this id is open, or another socket uses it.
        """
        session = self[id]
        if id in self._attached:
            raise UsageError(f"session {id!r} is already in use by another socket")
        self._attached[id] = hang_up
        return session

    def detach(self, id: str) -> None:
        """End a socket's use of a session, which stays open."""
        self._attached.pop(id, None)

    async def close(self, id: str) -> None:
        """Close a session and its environment.

        Raises:
            UsageError: No session with this id is open, or a socket uses it.
        """
        session = self[id]
        if id in self._attached:
            raise UsageError(f"session {id!r} is in use by a socket", remedy="close the socket first")
        del self._open[id]
        await session.close()

    async def close_all(self) -> None:
        """Close every session; the caller has already closed their sockets."""
        self._attached.clear()
        for id in list(self._open):
            await self.close(id)


def _check_message(fields: Mapping[str, Any]) -> None:
    """Check the fields of an assistant's message.

    Raises:
        UsageError: The content is not text, or a call does not have OpenAI's format.
    """
    content, calls = fields.get("content", ""), fields.get("tool_calls", [])
    if not isinstance(content, str):
        raise UsageError(f"the content of an action must be text, not {content!r:.100}")
    if not isinstance(calls, list):
        raise UsageError(f"tool_calls must be a list, not {calls!r:.100}")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        texts = (
            [call.get("id"), function.get("name"), function.get("arguments")]
            if isinstance(function, dict)
            else [None]
        )
        if not all(isinstance(text, str) for text in texts):
            raise UsageError(
                f"this is not a tool call: {call!r:.200}",
                remedy='write {"id": ..., "function": {"name": ..., "arguments": ...}}, all of them texts',
            )


def _seed(seed: Any) -> int:
    """Return the seed that a client sent, or a new one."""
    if seed is None:
        return uuid.uuid4().int % 2**31
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _MAX_SEED:
        raise UsageError(f"a seed must be a whole number from 0 to {_MAX_SEED}, not {seed!r:.100}")
    return seed


def _episode_id(id: Any) -> str:
    """Return the episode's id that a client sent, or a new one."""
    if id is None:
        return str(uuid.uuid4())
    if not isinstance(id, str) or not 0 < len(id) <= 200:
        raise UsageError(f"an episode_id must be a text of at most 200 characters, not {id!r:.100}")
    return id


def _answer(
    seen: dict[str, Any], reward: float | None, *, done: bool, metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return an observation in the format that OpenEnv's clients parse."""
    facts = metadata or {}
    return {"observation": {**seen, "metadata": facts}, "reward": reward, "done": done, "metadata": facts}


def _tool(function: Any) -> dict[str, Any]:
    return {
        "name": function["name"],
        "description": function.get("description", ""),
        "input_schema": function.get("parameters", {}),
    }
