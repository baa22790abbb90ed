"""A server for agents that run elsewhere: it answers them with a model and keeps what the model sampled.

1. `POST /sessions` with `{"task": {...}}` opens a session and returns the addresses that SDKs get.
2. The agent asks at these addresses, with any key.
3. `POST /s/SECRET/end` with `{"reward": 1.0}` ends the session and writes its episode to the run. Sessions of
   equal tasks become the members of one group.
4. Opening and ending need the server's token, so that an agent can neither score itself nor read other
   sessions. A session without a request for `idle_s` seconds ends and is recorded as aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, cast

from aiohttp import web

from agentenv.core.episode_env import Task, derive_seed
from agentenv.core.errors import UsageError
from agentenv.core.limits import RunLimits
from agentenv.core.messages import JsonValue
from agentenv.core.serving.guard import Guard, Refused
from agentenv.core.serving.listening import Served, listen, read_object
from agentenv.core.trajectory import EpisodeError, StopReason, Trajectory
from agentenv.endpoint.server import Endpoint
from agentenv.endpoint.session import Session, SessionOptions
from agentenv.engine.forms import LoadedModel
from agentenv.engine.interface import Sampling
from agentenv.render.renderer import Renderer
from agentenv.runs.store.writer import RunWriter

__all__ = ["ENV_ID", "CaptureServer", "capture_agents", "capture_forever", "record_of"]

ENV_ID = "capture/Agent-v0"
"""Environment id of the episodes."""
IDLE_S = 1800.0
_LOOK_EVERY_S = 5.0


@dataclass(slots=True)
class _OpenSession:
    """An open session."""

    session: Session
    task: Task
    member: int
    used: float = field(default_factory=time.monotonic)
    seen: int = 0
    """Number of turns when the session was last looked at."""


class CaptureServer:
    """Serves a model to agents that run elsewhere, and writes their episodes to a run.

    Args:
        model: the model.
        writer: writes the run.
        guard: rules for whom the server answers; its token opens and ends sessions.
        limits: limits of each session.
        sampling: sampling settings, which replace those of the agents.
        idle_s: seconds without a request after which a session ends.
    """

    def __init__(
        self,
        model: LoadedModel,
        writer: RunWriter,
        guard: Guard,
        *,
        limits: RunLimits | None = None,
        sampling: Sampling | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        self.guard = guard
        self.writer = writer
        self._engine = model.engine
        self._renderer = None if model.tokenizer is None else Renderer(model.tokenizer)
        self._limits = limits or RunLimits(max_turns=None)
        self._sampling = sampling or Sampling()
        self._idle_s = idle_s
        self._open: dict[str, _OpenSession] = {}
        self._members: Counter[str] = Counter()
        self._endpoint = Endpoint(guard, model=model.engine.name, key_of=self._any_key)

    def app(self) -> web.Application:
        """Return the aiohttp application of the server."""
        begin, end = web.post("/sessions", self._begin), web.post("/s/{secret}/end", self._end)
        return self._endpoint.app([begin, end, web.get("/health", _health)])

    async def end_idle(self) -> None:
        """End the sessions that are idle, again and again, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """End the sessions that have been idle for too long, and record them as aborted."""
        now = time.monotonic()
        for secret, opened in list(self._open.items()):
            if opened.session.busy or len(opened.session.turns) != opened.seen:
                opened.used, opened.seen = now, len(opened.session.turns)
            elif now - opened.used > self._idle_s:
                late = EpisodeError("agent", "TimeoutError", f"no request for {self._idle_s:g} s")
                await self._finish(secret, None, late)

    async def close(self) -> None:
        """End all sessions; those that were not ended by a reward are recorded as aborted."""
        for secret in list(self._open):
            await self._finish(secret, None, EpisodeError("agent", "EOFError", "the server was stopped"))

    def _any_key(self, request: web.Request) -> Sequence[str]:
        """Return the keys that a request may carry in place of the token: any, at a session's address."""
        if not request.path.startswith("/s/") or request.path.endswith("/end"):
            return ()
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        return [request.headers.get("X-API-Key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]

    async def _begin(self, request: web.Request) -> web.Response:
        asked = await read_object(request) if request.can_read_body else {}
        fields = asked.get("task", {})
        if not isinstance(fields, dict):
            raise UsageError("task must be an object")
        task = Task.of(fields)
        member = self._members[task.id]
        self._members[task.id] += 1
        run_seed = self.writer.info.seed

        def seed_of(number: int) -> int:
            return derive_seed(run_seed, ENV_ID, task.id, member, number)

        options = SessionOptions(
            name=f"{ENV_ID}:{task.id}/{member}", sampling=self._sampling, limits=self._limits, seed_of=seed_of
        )
        session = Session(self._engine, self._renderer, options)
        secret = self._endpoint.open(session)
        self._open[secret] = _OpenSession(session, task, member)
        host = f"{request.scheme}://{request.host}"
        url = f"{host}/s/{secret}"
        told = {"url": url, "openai_base_url": f"{url}/v1", "anthropic_base_url": url, "end": f"{url}/end"}
        return web.json_response({**told, "task_id": task.id, "member": member})

    async def _end(self, request: web.Request) -> web.Response:
        secret = request.match_info["secret"]
        if secret not in self._open:
            raise Refused(404, "there is no open session at this address", remedy="it may be over")
        reward = (await read_object(request)).get("reward")
        number = isinstance(reward, int | float) and not isinstance(reward, bool) and isfinite(reward)
        if reward is not None and not number:
            raise UsageError(f"the reward {reward!r:.80} is no finite number", remedy="send a number or null")
        record = await self._finish(secret, None if reward is None else float(reward), None)
        trained = sum(sequence.num_trained_tokens for sequence in record.sequences)
        counts = {"turns": len(record.turns), "sequences": len(record.sequences)}
        counts |= {"sampled_tokens": record.num_sampled_tokens, "trained_tokens": trained}
        return web.json_response({"run": self.writer.id, **counts, "trainable": record.trainable})

    async def _finish(self, secret: str, reward: float | None, error: EpisodeError | None) -> Trajectory:
        """End a session, and write its episode."""
        opened = self._open.pop(secret)
        await self._endpoint.close(secret)
        record = record_of(opened.session, opened.task, opened.member, reward=reward, error=error)
        with suppress(Exception):  # a cache that cannot be freed loses no episode
            await opened.session.release()
        self.writer.append(record)
        return record


def record_of(
    session: Session, task: Task, member: int, *, reward: float | None, error: EpisodeError | None
) -> Trajectory:
    """Return the trajectory of a session that has ended."""
    captured = session.captured()
    turns = list(captured.turns)
    if turns and reward is not None:
        turns[-1] = replace(turns[-1], reward=reward)
    why = session.untrainable_reason or captured.untrainable_reason
    if error is not None:
        why = f"failed at {error.boundary}: {error.type}: {error.message}"
    elif not why and not captured.has_policy_tokens:
        why = "no token was sampled by the policy"
    failed = StopReason.ABORTED if error is not None else None
    counts = {name: float(count) for name, count in session.counts.items() if count}
    left_out = {f"{cause}_tokens": float(count) for cause, count in captured.left_out.items()}
    return Trajectory(
        env_id=ENV_ID,
        task_id=task.id,
        seed=0,
        group_id=f"{ENV_ID}:{task.id}",
        stop_reason=failed or session.stop or StopReason.FINAL_ANSWER,
        member=member,
        turns=tuple(turns),
        sequences=captured.sequences,
        messages=captured.messages,
        reward=reward,
        error=error,
        untrainable_reason=why,
        task=cast("Mapping[str, JsonValue]", dict(task.data)),
        tools=captured.tools,
        rewrites=captured.rewrites,
        metrics={"turns": float(len(turns)), **counts, **left_out},
    )


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "healthy"})


@asynccontextmanager
async def capture_agents(
    model: LoadedModel, writer: RunWriter, guard: Guard, *, port: int = 0, **options: Any
) -> AsyncGenerator[Served]:
    """Serve a model to agents that run elsewhere while the block runs, and yield the address and the token.

    Args:
        model: the model.
        writer: writes the run.
        guard: rules for whom the server answers.
        port: port on which the server listens; 0 chooses a free one.
        options: further options of `CaptureServer`.

    Raises:
        OSError: The port is in use.
    """
    server = CaptureServer(model, writer, guard, **options)
    async with listen(server.app(), guard, port=port) as served:
        looking = asyncio.create_task(server.end_idle())
        try:
            yield served
        finally:
            looking.cancel()
            await server.close()


async def capture_forever(
    model: LoadedModel, writer: RunWriter, guard: Guard, *, port: int, said: Callable[[str], None]
) -> None:
    """Serve until cancelled; the command `agentenv serve --capture` calls this.

    Raises:
        UsageError: The server cannot listen on the port.
    """
    try:
        async with capture_agents(model, writer, guard, port=port) as served:
            said(f"serving {model.engine.name} to agents at {served.url}; episodes go to {writer.path}")
            said(served.how_to_send("AGENTENV_TOKEN"))
            await asyncio.Event().wait()
    except OSError as error:
        raise UsageError(
            f"the server cannot listen at {guard.host}:{port}: {error}", remedy="choose another --port"
        ) from error
    finally:
        await model.engine.close()
