"""Play single episodes of an environment; groups, evaluations, checks and demonstrations all use this.

Rules:

1. A failure while an episode is played is written to its record; `play` raises only when it is cancelled.
2. After a temporary failure of infrastructure the episode is played again; the ledger counts it once.
3. Each attempt has its own environment, user, conversation and sandbox. All are closed after the attempt,
   also when the attempt is cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, cast

from agentenv.core.episode_env import Context, EpisodeEnv
from agentenv.core.limits import DonePolicy, RunLimits
from agentenv.core.seats import OpenSeat, SeatEpisode, seat_opener
from agentenv.core.trajectory import Trajectory
from agentenv.core.visible import logger
from agentenv.engine.interface import ChatEngine, Engine
from agentenv.runner.conversation.conversation import Conversation, Recorded
from agentenv.runner.conversation.tokens import TokenConversation
from agentenv.runner.episode import Episode
from agentenv.runner.options import RunnerOptions
from agentenv.runner.plan import Job, Plan, Rules, TaskLike, jobs_of
from agentenv.runner.watchdog import Closing, Lease, Ledger, SandboxPool, Watchdog, own_pool

if TYPE_CHECKING:
    from agentenv.endpoint.session import SessionOptions
    from agentenv.render.renderer import Renderer
    from agentenv.runner.agent import AgentConversation
    from agentenv.runner.condense import Condenser
    from agentenv.runner.outputs import FullOutputs
    from agentenv.runner.seats import Seats
    from agentenv.runner.users import User, UserLike

__all__ = ["PlayableSpec", "Shared", "Stage"]

_log = logger(__name__)
LONGEST_RETRY_WAIT_S = 8.0
"""Longest wait before a further attempt, unless `retry_wait_s` is longer."""


class PlayableSpec(Protocol):
    """The part of an environment's spec that the runner uses."""

    @property
    def id(self) -> str: ...  # noqa: D102 - the fields of agentenv.envs.EnvSpec
    @property
    def limits(self) -> RunLimits | None: ...  # noqa: D102
    @property
    def user(self) -> object: ...  # noqa: D102
    @property
    def done_policy(self) -> DonePolicy: ...  # noqa: D102
    @property
    def sandbox(self) -> str | None: ...  # noqa: D102
    def make(self, **kwargs: object) -> EpisodeEnv: ...  # noqa: D102
    def prepare(self, **kwargs: object) -> AbstractAsyncContextManager[None]: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Objects that all stages of a runner share."""

    engine: Engine | ChatEngine
    renderer: Renderer | None
    options: RunnerOptions
    ledger: Ledger
    watchdog: Watchdog
    sandbox: SandboxPool | None
    condenser: Condenser | None
    full_outputs: FullOutputs | None
    name: str = ""
    """Begins the number of each attempt, so that runners on one engine have different sessions."""
    sessions: Iterator[int] = field(default_factory=itertools.count)
    """Numbers the attempts, so that no two attempts have the same name."""


@dataclass(slots=True)
class _Resources:
    """Resources that one attempt holds so far; the further seats are closed first."""

    conversation: Recorded
    seat_env: EpisodeEnv | None = None
    """Environment of a further seat of a game, which another episode holds."""
    user: User | None = None
    env: EpisodeEnv | None = None
    lease: Lease | None = None
    seats: Seats | None = None


class Stage:
    """Plays single episodes of one environment; `Runner.stage` makes it.

    ```python
    async with runner.stage(spec) as stage:
        for job in stage.jobs(tasks):
            trajectory = await stage.play(job)
    ```

    Args:
        shared: objects that all stages of a runner share.
        spec: specification that makes the environments, one for each attempt.
        rules: what all episodes of the stage have in common.
        run_seed: seed of the run, from which `jobs` derives the seeds of the episodes.
        user: user that replaces the spec's.
        env_kwargs: keyword arguments for `spec.make`.
        close_envs: shut each environment down after its attempt.
        one_object: `spec.make` returns the same environment each time, so that an episode is played again
            only if the environment was not begun.
    """

    def __init__(
        self,
        shared: Shared,
        spec: PlayableSpec,
        rules: Rules,
        *,
        run_seed: int,
        user: UserLike = None,
        env_kwargs: Mapping[str, object] | None = None,
        close_envs: bool = True,
        one_object: bool = False,
    ) -> None:
        self.spec = spec
        self.rules = rules
        self._run_seed = run_seed
        self._shared = shared
        self._user = cast("UserLike", spec.user) if user is None else user
        self.env_kwargs = dict(env_kwargs or {})
        self._close_envs = close_envs
        self._one_object = one_object
        self._sandbox = shared.sandbox
        self._closing = Closing(shared.options.close_timeout_s)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Let the spec prepare, and open the sandbox that it names if the runner has none."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.spec.prepare(**self.env_kwargs))
            if self._sandbox is None:
                self._sandbox = await own_pool(self.spec.sandbox, stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until all resources of the episodes are closed, then close the sandbox."""
        # Pushed last, so it runs first: what episodes still close may need the sandbox.
        self._stack.push_async_callback(self._closing.wait)
        await self._stack.aclose()

    def jobs(
        self, tasks: Iterable[TaskLike], *, round_index: int = 0, repeats: Iterable[int] | None = None
    ) -> Iterator[Job]:
        """Yield a job for each task, with the group's id and seeds; tasks are read lazily.

        Args:
            tasks: the tasks to play; a repeated task becomes another group.
            round_index: round of a training run; a task that is repeated in another round gets new seeds.
            repeats: how often each task came before in the round; by default counted over `tasks`.
        """
        return jobs_of(tasks, self.spec.id, self._run_seed, round_index, repeats)

    async def play(
        self, job: Job, member: int = 0, *, on_record: Callable[[Trajectory], None] | None = None
    ) -> Trajectory:
        """Play one member of a group and return its record, whatever happens in it.

        The same job and member give the same seeds, wherever and in whatever order they are played.

        Args:
            job: the group.
            member: number of the member.
            on_record: called once with the record, before the resources of the episode are closed. A
                cancellation that arrives while they are closed therefore loses no finished episode.
        """
        plan = Plan(self.rules, job, member)
        ledger, wait_s = self._shared.ledger, self._shared.options.retry_wait_s
        longest = max(wait_s, LONGEST_RETRY_WAIT_S)
        attempt = 0
        spent_s = 0.0
        record: Trajectory | None = None
        ledger.start()
        try:
            while True:
                # An attempt has an environment, a user and a sandbox of its own: nothing of one that failed
                # reaches the next.
                async with self._attempt(plan, attempt) as (episode, playing, held):
                    try:
                        await playing
                        if held.seats is not None:
                            await held.seats.finish(playing.result())
                    finally:
                        # The record may be complete although this wait was cancelled.
                        record = self._final(episode, playing, attempt, spent_s + wait_s)
                        if held.seats is not None:
                            record = held.seats.joined(record)
                        if record is not None:
                            ledger.finish(record)
                            if on_record is not None:
                                on_record(record)
                if record is not None:
                    return record
                attempt += 1
                ledger.retried += 1
                _warn_of_retry(plan, playing.result(), attempt, wait_s)
                await asyncio.sleep(wait_s)
                spent_s += wait_s + _played_s(playing.result())
                wait_s = min(2 * wait_s, longest)
        except BaseException:
            if record is None:  # otherwise it was counted as finished, and is cancelled while it closes
                ledger.cancel()
            raise

    def _final(
        self, episode: Episode, playing: asyncio.Future[Trajectory], attempt: int, spent_s: float
    ) -> Trajectory | None:
        """Return the record of an attempt; None if there is none, or if the episode is to be played again.

        Args:
            episode: the attempt.
            playing: its record.
            attempt: number of earlier attempts.
            spent_s: seconds of the earlier attempts and of all waits, with the one that would follow.
        """
        if not playing.done() or playing.cancelled() or playing.exception() is not None:
            return None
        record = playing.result()
        if record.error is None or not record.error.retryable or attempt >= self._shared.options.retries:
            return record
        limit = self.rules.limits.episode_timeout_s
        if limit is not None and spent_s + _played_s(record) > limit:
            return record
        # The one environment of a caller may be left in the middle of an episode, where no other can begin.
        return record if self._one_object and episode.touched else None

    # An attempt ---------------------------------------------------------------------------

    @asynccontextmanager
    async def _attempt(
        self, plan: Plan, attempt: int, seat_env: EpisodeEnv | None = None
    ) -> AsyncGenerator[tuple[Episode, asyncio.Future[Trajectory], _Resources]]:
        """Start an attempt; yield its episode, the future of its record and what it holds; close that.

        The attempt of a further seat of a game has an environment already, and no sandbox or user.
        """
        name = f"{plan.name}/{attempt}#{self._shared.name}{next(self._shared.sessions)}"
        conversation = self._conversation(plan, name)
        held = _Resources(conversation, seat_env)
        try:
            episode = self._episode(plan, attempt, name, held, conversation)
            token = seat_opener.set(
                None if seat_env is not None else self._opener(plan, attempt, held, episode)
            )
            async with self._shared.watchdog.playing(name, episode) as record:
                seat_opener.reset(token)  # the task of the episode has a copy
                yield episode, record, held
        finally:
            await self._closing.settle(self._close(held))

    def _opener(self, plan: Plan, attempt: int, held: _Resources, episode: Episode) -> OpenSeat:
        """Return the function with which a game begins the episodes of its further seats."""
        # Not the context in which the environment's code runs: it may be bound to a thread.
        context = contextvars.copy_context()

        def open_seat(seat: str, env: EpisodeEnv) -> SeatEpisode:
            if held.seats is None:
                # Few environments are games, so nothing of their seats is made before one opens a seat.
                from agentenv.runner.seats import Seats

                held.seats = Seats(
                    plan,
                    episode.guard,
                    lambda plan, env: self._seat_attempt(plan, attempt, env),
                    context,
                    engine=self._shared.engine,
                )
            return held.seats.open(seat, env)

        return open_seat

    @asynccontextmanager
    async def _seat_attempt(
        self, plan: Plan, attempt: int, env: EpisodeEnv
    ) -> AsyncGenerator[tuple[Episode, asyncio.Future[Trajectory]]]:
        async with self._attempt(plan, attempt, env) as (episode, record, _):
            yield episode, record

    def _episode(
        self,
        plan: Plan,
        attempt: int,
        name: str,
        held: _Resources,
        conversation: Conversation,
    ) -> Episode:
        """Return the episode of an attempt, which makes its environment and user itself."""
        shared, job, limits = self._shared, plan.job, plan.rules.limits

        def open_env() -> EpisodeEnv:
            if held.seat_env is not None:
                return held.seat_env
            env = self.spec.make(**self.env_kwargs)
            held.env = env if self._close_envs else None
            return env

        def open_user() -> User | None:
            if held.seat_env is None and self._user is not None:
                from agentenv.runner.users import user_for

                held.user = user_for(self._user, job.task)
            return held.user

        def open_agent(options: SessionOptions) -> AgentConversation:
            # The endpoint behind it is loaded with the first agent.
            from agentenv.runner.agent import AgentConversation

            conversation = AgentConversation(self._engine(plan), shared.renderer, options)
            held.conversation = conversation
            return conversation

        if self._sandbox is not None and held.seat_env is None:
            held.lease = Lease(self._sandbox, shared.options.lease_timeout_s)
        context = Context(episode_id=name, seed=job.seed, task=job.task, limits=limits)
        context.tool_calls_left = limits.max_tool_calls
        return Episode(
            plan,
            open_env,
            open_user,
            conversation,
            context,
            open_agent=open_agent,
            condenser=shared.condenser,
            lease=held.lease,
            full_outputs=shared.full_outputs,
            attempt=attempt,
        )

    def _conversation(self, plan: Plan, name: str) -> Conversation:
        shared, limits = self._shared, plan.rules.limits
        engine = self._engine(plan)
        if shared.renderer is None:
            from agentenv.runner.conversation.text import ChatConversation

            return ChatConversation(cast("ChatEngine", engine), limits)
        rewrite = shared.options.history == "rewrite"
        return TokenConversation(cast("Engine", engine), shared.renderer, limits, name, rewrite=rewrite)

    def _engine(self, plan: Plan) -> Engine | ChatEngine:
        """Return the engine of an attempt, which begins with the turns that the plan shares."""
        engine, branch = self._shared.engine, plan.job.branch
        if branch is None:
            return engine
        from agentenv.engine.scripted.replayed import ChatReplayEngine, ReplayEngine

        if isinstance(engine, ChatEngine):
            return ChatReplayEngine(branch.record, turns=branch.turns, live=engine)
        return ReplayEngine(branch.record, turns=branch.turns, live=engine)

    async def _close(self, held: _Resources) -> None:
        # The lambdas look up the methods inside the boundary: outside code may make them properties.
        close, user, env, lease = self._closing.close, held.user, held.env, held.lease
        if held.seats is not None and held.seats.opened:
            await close("seats", held.seats.stop)
        await close("release", held.conversation.release)
        if user is not None:
            await close("user", lambda: user.close())  # noqa: PLW0108
        if env is not None:
            await close(type(env).__name__, lambda: env.shutdown())  # noqa: PLW0108
        if lease is not None:
            await close("sandbox", lease.give_back)


def _played_s(record: Trajectory) -> float:
    """Return the seconds of an attempt, without those in which it waited for a sandbox or the engine."""
    return record.timings.get("total_s", 0.0) - record.timings.get("queue_s", 0.0)


def _warn_of_retry(plan: Plan, failed: Trajectory, attempt: int, wait_s: float) -> None:
    if (error := failed.error) is not None:
        _log.warning(
            "episode %s of %s aborted at %s (%s: %s); attempt %d follows in %.1f s",
            *(plan.member, plan.job.group_id, error.boundary, error.type, error.message),
            *(attempt + 1, wait_s),
        )
