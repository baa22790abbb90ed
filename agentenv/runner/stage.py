"""Play one member of one group: the stage that groups, evaluations, checks and demonstrations share.

Rules:

1. Whatever goes wrong while an episode is played is in its record; `play` raises only when it is
   cancelled.
2. An episode whose infrastructure failed in a way that may pass is played again; the ledger counts it once.
3. Each attempt has its own environment, user, conversation and sandbox; all are closed after it, also when
   the attempt is cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, cast

from agentenv.core.context import Context
from agentenv.core.episode_env import EpisodeEnv
from agentenv.core.limits import DonePolicy, RunLimits
from agentenv.core.messages import JsonValue
from agentenv.core.trajectory import Trajectory
from agentenv.engine.base import ChatEngine, Engine
from agentenv.render.base import RendererProtocol
from agentenv.runner.condense import Condenser
from agentenv.runner.conversation.base import Conversation
from agentenv.runner.conversation.text import ChatConversation
from agentenv.runner.conversation.tokens import TokenConversation
from agentenv.runner.episode import Episode
from agentenv.runner.guard import Failure, at
from agentenv.runner.held import Closing, Lease, SandboxPool, own_pool
from agentenv.runner.ledger import Ledger
from agentenv.runner.options import RunnerOptions
from agentenv.runner.outputs import FullOutputs
from agentenv.runner.plan import Job, Plan, TaskLike, jobs_of
from agentenv.runner.users import User, UserLike, user_for
from agentenv.runner.watchdog import Watchdog

__all__ = ["PlayableSpec", "Shared", "Stage"]

_log = logging.getLogger(__name__)


class PlayableSpec(Protocol):
    """What the runner needs of an environment's spec."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all stages of a runner share."""

    engine: Engine | ChatEngine
    renderer: RendererProtocol | None
    options: RunnerOptions
    ledger: Ledger
    watchdog: Watchdog
    sandbox: SandboxPool | None
    condenser: Condenser | None
    full_outputs: FullOutputs | None
    sessions: Iterator[int] = field(default_factory=itertools.count)
    """Numbers for the attempts, so that no two have one name."""


@dataclass(slots=True)
class _Held:
    """What one attempt holds, as far as it came; closed in this order."""

    conversation: Conversation
    user: User | None = None
    env: EpisodeEnv | None = None
    lease: Lease | None = None


class Stage:
    """Plays members of the groups of one environment; made by `Runner.stage`.

    ```python
    async with runner.stage(spec) as stage:
        for job in stage.jobs(tasks):
            trajectory = await stage.play(job)
    ```

    Args:
        shared: what all stages of a runner share.
        spec: makes the environments, one for each attempt.
        template: what all episodes of the stage have in common.
        user: in place of the spec's.
        env_kwargs: for `spec.make`.
        close_envs: shut each environment down after its attempt.
    """

    def __init__(
        self,
        shared: Shared,
        spec: PlayableSpec,
        template: Plan,
        *,
        user: UserLike = None,
        env_kwargs: Mapping[str, object] | None = None,
        close_envs: bool = True,
    ) -> None:
        self.spec = spec
        self.template = template
        self._shared = shared
        self._user = cast("UserLike", spec.user) if user is None else user
        self._env_kwargs = dict(env_kwargs or {})
        self._close_envs = close_envs
        self._sandbox = shared.sandbox
        self._closing = Closing(shared.options.close_timeout_s)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Open the sandbox that the spec names, where the runner has none."""
        if self._sandbox is None:
            self._sandbox = await own_pool(self.spec.sandbox, self._stack)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave when everything that the episodes held is closed."""
        self._stack.push_async_callback(self._closing.wait)
        await self._stack.aclose()

    def jobs(self, tasks: Iterable[TaskLike], *, round_index: int = 0) -> Iterator[Job]:
        """Give every task's group its id and seeds; tasks are taken as jobs are.

        Args:
            tasks: what to play; a task met again is another group.
            round_index: of a training run, so that a task met again in another round is sampled anew.
        """
        return jobs_of(tasks, self.spec.id, self.template.run_seed, round_index)

    async def play(self, job: Job, member: int = 0) -> Trajectory:
        """Play one member of a group and return its record, whatever happens in it.

        The same job and member give the same seeds wherever and in whatever order they are played.
        """
        plan = job.plan(self.template, member)
        ledger, options = self._shared.ledger, self._shared.options
        attempt, wait_s = 0, options.retry_wait_s
        ledger.start()
        try:
            while True:
                async with self._attempt(plan, attempt) as playing:
                    trajectory = await playing
                error = trajectory.error
                if error is None or not error.retryable or attempt >= options.retries:
                    ledger.finish(trajectory)
                    return trajectory
                attempt += 1
                ledger.retried += 1
                _log.warning(
                    "episode %s of %s aborted at %s (%s: %s); attempt %d follows in %.1f s",
                    *(plan.member, plan.group_id, error.boundary, error.type, error.message),
                    *(attempt + 1, wait_s),
                )
                await asyncio.sleep(wait_s)
                wait_s *= 2
        except BaseException:
            ledger.cancel()
            raise

    # An attempt ---------------------------------------------------------------------------

    @asynccontextmanager
    async def _attempt(self, plan: Plan, attempt: int) -> AsyncGenerator[Awaitable[Trajectory]]:
        """Begin an attempt and give what its record is awaited with; close what it held."""
        name = f"{plan.group_id}/{plan.member}/{attempt}#{next(self._shared.sessions)}"
        held = _Held(self._conversation(plan.limits, name))
        try:
            try:
                episode = self._episode(plan, attempt, name, held)
            except Failure as failure:
                unplayed = asyncio.get_running_loop().create_future()
                unplayed.set_result(_unplayed(plan, attempt, failure))
                yield unplayed
                return
            async with self._shared.watchdog.playing(name, episode) as record:
                yield record
        finally:
            await self._closing.settle(self._close(held))

    def _episode(self, plan: Plan, attempt: int, name: str, held: _Held) -> Episode:
        """Make what an attempt is played with.

        Raises:
            Failure: The environment or its user cannot be made.
        """
        shared = self._shared
        with at("env"):
            env = self.spec.make(**self._env_kwargs)
        held.env = env if self._close_envs else None
        with at("user"):
            held.user = user_for(self._user, plan.task)
        if self._sandbox is not None:
            held.lease = Lease(self._sandbox, shared.options.lease_timeout_s)
        limits = plan.limits
        context = Context(episode_id=name, seed=plan.seed, task=plan.task, limits=limits)
        context.tool_calls_left = limits.max_tool_calls
        return Episode(
            plan,
            env,
            held.conversation,
            context,
            held.user,
            condenser=None if shared.condenser is None else shared.condenser.fresh(),
            lease=held.lease,
            full_outputs=shared.full_outputs,
            attempt=attempt,
        )

    def _conversation(self, limits: RunLimits, name: str) -> Conversation:
        shared = self._shared
        if shared.renderer is None:
            return ChatConversation(cast("ChatEngine", shared.engine), limits)
        rewrite = shared.options.history == "rewrite"
        return TokenConversation(
            cast("Engine", shared.engine), shared.renderer, limits, name, rewrite=rewrite
        )

    async def _close(self, held: _Held) -> None:
        close: Callable[[str, Callable[[], Awaitable[object]]], Awaitable[None]] = self._closing.close
        await close("release", held.conversation.release)
        if held.user is not None:
            await close("user", held.user.close)
        if held.env is not None:
            await close(type(held.env).__name__, held.env.shutdown)
        if held.lease is not None:
            await close("sandbox", held.lease.give_back)


def _unplayed(plan: Plan, attempt: int, failure: Failure) -> Trajectory:
    """Return the record of an episode that failed before its first step."""
    error = failure.error
    return Trajectory(
        env_id=plan.env_id,
        task_id=plan.task_id,
        seed=plan.seed,
        group_id=plan.group_id,
        stop_reason=failure.reason,
        member=plan.member,
        attempt=attempt,
        error=error,
        untrainable_reason=f"failed at {error.boundary}: {error.type}: {error.message}",
        task=cast("Mapping[str, JsonValue]", plan.task),
    )
