"""Play episodes, many at once: the runner knows no environment and no trainer.

One bad episode is one record with its cause. What a caller does wrong (a task without data, a
renderer that fits no engine) raises at once; what goes wrong while an episode is played never does.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from agentenv.core.context import Context
from agentenv.core.episode_env import EpisodeEnv
from agentenv.core.errors import UsageError
from agentenv.core.limits import DonePolicy, RunLimits
from agentenv.core.messages import JsonValue
from agentenv.core.seeds import derive_seed
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.engine.base import ChatEngine, Engine, Sampling
from agentenv.render.base import RendererProtocol
from agentenv.runner.condense import Condenser
from agentenv.runner.conversation.base import Conversation
from agentenv.runner.conversation.overflow import FullOutputs
from agentenv.runner.conversation.text import ChatConversation
from agentenv.runner.conversation.tokens import TokenConversation
from agentenv.runner.episode import Episode
from agentenv.runner.groups import GroupPolicy, play_groups
from agentenv.runner.guard import Failure
from agentenv.runner.held import Closing
from agentenv.runner.leasing import Lease, SandboxPool, own_pool
from agentenv.runner.ledger import Ledger
from agentenv.runner.options import RunnerOptions
from agentenv.runner.plan import Job, TaskLike, jobs_of, read_task
from agentenv.runner.recorder import Plan, Score
from agentenv.runner.users import User, UserLike, user_for
from agentenv.runner.watchdog import Watchdog

__all__ = ["PlayableSpec", "Runner", "TaskLike"]

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


class Runner:
    """Plays episodes with one engine.

    Args:
        engine: makes tokens, or speaks text (a `ChatEngine`).
        renderer: messages to tokens and back; none with a `ChatEngine`.
        limits: of every episode; a spec's own limits hold too, the stricter of both.
        sampling: how completions are drawn; seed and token limit are set for each turn.
        run_seed: every seed derives from it, and from what the episode is.
        options: how many episodes at once, retries, waits and history.
        sandbox: lends every attempt at an episode a clean sandbox of its own, in its `Context`; without
            it `run_groups` opens the one that a spec names.
        condenser: shortens conversations that come near the context's limit.
        full_outputs: directory for the whole of each tool output that was cut, one file for each.

    Raises:
        UsageError: Engine and renderer do not belong together, or a number is out of range.
    """

    def __init__(
        self,
        engine: Engine | ChatEngine,
        renderer: RendererProtocol | None = None,
        limits: RunLimits | None = None,
        *,
        sampling: Sampling | None = None,
        run_seed: int = 0,
        options: RunnerOptions | None = None,
        sandbox: SandboxPool | None = None,
        condenser: Condenser | None = None,
        full_outputs: str | Path | None = None,
    ) -> None:
        chat = isinstance(engine, ChatEngine)
        if chat and renderer is not None:
            raise UsageError(f"{engine.name} only speaks text: it takes no renderer")
        if not chat and renderer is None:
            raise UsageError(f"{engine.name} works on tokens: pass the renderer of its tokenizer")
        if sandbox is not None and not isinstance(sandbox, SandboxPool):
            raise UsageError(f"{type(sandbox).__name__} lends no sandboxes: it has no lease()")
        self.engine = engine
        self.renderer = renderer
        self.limits = limits or RunLimits()
        self.sampling = sampling or Sampling()
        self.run_seed = run_seed
        self.options = options = options or RunnerOptions()
        self.ledger = Ledger()
        self._sandbox = sandbox
        self._condenser = condenser
        self._full_outputs = None if full_outputs is None else FullOutputs(full_outputs)
        self._sessions = itertools.count()
        self._closing = Closing(options.close_timeout_s)
        self.watchdog = Watchdog(warn_after_s=options.warn_after_s, grace_s=options.close_timeout_s)

    async def run_episode(
        self,
        env: EpisodeEnv,
        task: TaskLike,
        *,
        seed: int | None = None,
        env_id: str | None = None,
        group_id: str | None = None,
        member: int = 0,
        limits: RunLimits | None = None,
        sampling: Sampling | None = None,
        user: UserLike = None,
        done_policy: DonePolicy = "stop",
        score: Score | None = None,
        close: bool = True,
    ) -> Trajectory:
        """Play one episode and return its record, whatever happens in it.

        Args:
            env: the environment; begun, ended and closed here.
            task: what to play.
            seed: of the environment; derived from the run seed and the task by default.
            env_id: for the record and the seeds; the class's name by default.
            group_id: for the record; environment and task by default.
            member: place in a group; part of the sampling seeds.
            limits: further limits; the stricter of these and the runner's hold.
            sampling: in place of the runner's.
            user: answers the model's text turns.
            done_policy: what `is_done()` does.
            score: adds a reward to the environment's own.
            close: shut the environment down afterwards.
        """
        task_id, data = read_task(task)
        name = env_id or type(env).__name__
        group_id = group_id or f"{name}:{task_id}"
        seed = derive_seed(self.run_seed, name, task_id) if seed is None else seed
        job = Job(task_id, data, self.run_seed, group_id, seed)
        template = self._template(name, self.limits.stricter(limits), sampling, done_policy, score)
        scene = _Scene(lambda: env, user, self._sandbox, owned=False)
        try:
            return await self._run(job.plan(template, member), scene)
        finally:
            if close:
                await self._closing.settle(self._closing.close(type(env).__name__, env.shutdown))

    async def run_groups(
        self,
        spec: PlayableSpec,
        tasks: Iterable[TaskLike],
        group_size: int = 1,
        *,
        round_index: int = 0,
        limits: RunLimits | None = None,
        sampling: Sampling | None = None,
        user: UserLike = None,
        done_policy: DonePolicy | None = None,
        score: Score | None = None,
        env_kwargs: Mapping[str, object] | None = None,
        policy: GroupPolicy | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> AsyncGenerator[TrajectoryGroup]:
        """Play a group of episodes for each task; yield the groups as they finish.

        Use `contextlib.aclosing` where the loop may be left early.

        Args:
            spec: makes the environments, one for each attempt.
            tasks: what to play; taken as there is room, so it may be endless.
            group_size: episodes of each task; same environment seed, different samples.
            round_index: of a training run, so that a task met again is sampled anew.
            limits: further limits; the strictest of these, the spec's and the runner's hold.
            sampling: in place of the runner's.
            user: in place of the spec's.
            done_policy: in place of the spec's.
            score: adds a reward to the environment's own.
            env_kwargs: for `spec.make`.
            policy: what becomes of failed members.
            on_trajectory: called with each episode as it finishes.
        """
        policy = policy or GroupPolicy()
        policy.check(group_size)
        limits = self.limits.stricter(spec.limits).stricter(limits)
        template = self._template(spec.id, limits, sampling, done_policy or spec.done_policy, score)
        async with self._stage(spec, user, env_kwargs) as scene:
            groups = play_groups(
                jobs_of(tasks, spec.id, self.run_seed, round_index),
                lambda job, member: self._run(job.plan(template, member), scene),
                group_size=group_size,
                policy=policy,
                concurrency=self.options.concurrency,
                on_trajectory=on_trajectory,
            )
            async with aclosing(groups):
                async for group in groups:
                    yield group

    def _template(
        self,
        env_id: str,
        limits: RunLimits,
        sampling: Sampling | None,
        done_policy: DonePolicy,
        score: Score | None,
    ) -> Plan:
        """What all episodes of a call have in common."""
        sampling = sampling or self.sampling
        return Plan(env_id=env_id, limits=limits, sampling=sampling, done_policy=done_policy, score=score)

    @asynccontextmanager
    async def _stage(
        self, spec: PlayableSpec, user: UserLike, env_kwargs: Mapping[str, object] | None
    ) -> AsyncGenerator[_Scene]:
        """Give what a spec's episodes are played with; leave when all that they held is closed."""
        player = cast("UserLike", spec.user) if user is None else user
        kwargs = dict(env_kwargs or {})
        async with AsyncExitStack() as stack:
            pool = self._sandbox or await own_pool(spec.sandbox, stack)
            stack.push_async_callback(self._closing.wait)
            yield _Scene(lambda: spec.make(**kwargs), player, pool, owned=True)

    # Attempts -----------------------------------------------------------------------------

    async def _run(self, plan: Plan, scene: _Scene) -> Trajectory:
        """Play a plan, again if infrastructure failed in a way that may pass; book the outcome."""
        self.ledger.start()
        attempt, wait_s = 0, self.options.retry_wait_s
        try:
            while True:
                trajectory = await self._attempt(plan, scene, attempt)
                error = trajectory.error
                if error is None or not error.retryable or attempt >= self.options.retries:
                    self.ledger.finish(trajectory)
                    return trajectory
                attempt += 1
                self.ledger.retried += 1
                _log.warning(
                    "episode %s of %s aborted at %s (%s: %s); attempt %d follows in %.1f s",
                    *(plan.member, plan.group_id, error.boundary, error.type, error.message),
                    *(attempt + 1, wait_s),
                )
                await asyncio.sleep(wait_s)
                wait_s *= 2
        except BaseException:
            self.ledger.cancel()
            raise

    async def _attempt(self, plan: Plan, scene: _Scene, attempt: int) -> Trajectory:
        limits = plan.limits
        session = f"{plan.group_id}/{plan.member}/{attempt}#{next(self._sessions)}"
        conversation = self._conversation(limits, session)
        context = Context(episode_id=session, seed=plan.seed, task=plan.task, limits=limits)
        context.tool_calls_left = limits.max_tool_calls
        lease = None if scene.pool is None else Lease(scene.pool, self.options.lease_timeout_s)
        env: EpisodeEnv | None = None
        person: User | None = None
        try:
            try:
                env = scene.make()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary: an environment that cannot be made
                return _stillborn(plan, attempt, Failure.of("env", error))
            try:
                person = user_for(scene.user, plan.task)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary: a user that cannot be made
                return _stillborn(plan, attempt, Failure.of("user", error))
            episode = Episode(
                plan,
                env,
                conversation,
                context,
                person,
                condenser=None if self._condenser is None else self._condenser.fresh(),
                lease=lease,
                full_outputs=self._full_outputs,
                attempt=attempt,
            )
            return await self.watchdog.play(session, episode)
        finally:
            closing = self._finish(conversation, person, env if scene.owned else None, lease)
            await self._closing.settle(closing)

    def _conversation(self, limits: RunLimits, session: str) -> Conversation:
        if self.renderer is None:
            return ChatConversation(cast("ChatEngine", self.engine), limits)
        engine = cast("Engine", self.engine)
        return TokenConversation(
            engine, self.renderer, limits, session, rewrite=self.options.history == "rewrite"
        )

    async def _finish(
        self, conversation: Conversation, user: User | None, env: EpisodeEnv | None, lease: Lease | None
    ) -> None:
        close = self._closing.close
        await close("release", conversation.release)
        if user is not None:
            await close("user", user.close)
        if env is not None:
            await close(type(env).__name__, env.shutdown)
        if lease is not None:
            await close("sandbox", lease.give_back)


@dataclass(frozen=True, slots=True)
class _Scene:
    """What an attempt is played with, besides engine and limits."""

    make: Callable[[], EpisodeEnv]
    user: UserLike
    pool: SandboxPool | None
    owned: bool
    """The environment is made for one attempt, and closed after it."""


def _stillborn(plan: Plan, attempt: int, failure: Failure) -> Trajectory:
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
