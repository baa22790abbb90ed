"""Play many episodes at once. The runner depends on no particular environment or trainer.

A failed episode becomes a record with its cause. A caller's mistake (a task without data, a renderer that
does not fit the engine) raises at once; a failure while an episode is played never raises.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from agentenv.core.episode_env import EpisodeEnv, Wrapped, derive_seed
from agentenv.core.errors import UsageError
from agentenv.core.limits import DonePolicy, RunLimits
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.core.visible import logger
from agentenv.engine.interface import ChatEngine, Engine, Sampling, features_of
from agentenv.runner.groups import JobFeed, play_groups
from agentenv.runner.options import GroupPolicy, RunnerOptions, episodes_at_once, short_turns
from agentenv.runner.plan import Job, Rules, Score, TaskLike, branches_of, read_task
from agentenv.runner.stage import PlayableSpec, Shared, Stage
from agentenv.runner.watchdog import Closing, Ledger, SandboxPool, Watchdog

if TYPE_CHECKING:
    from agentenv.render.renderer import Renderer
    from agentenv.runner.condense import Condenser
    from agentenv.runner.groups import Elsewhere, PlaysJobs
    from agentenv.runner.outputs import FullOutputs
    from agentenv.runner.users import UserLike

__all__ = ["Runner"]

log = logger(__name__)


class Runner:
    """Plays episodes with one engine.

    Args:
        engine: an `Engine`, which samples tokens, or a `ChatEngine`, which returns text.
        renderer: turns messages into tokens and back; leave it out with a `ChatEngine`.
        limits: limits of every episode; where a spec has limits too, the stricter value applies.
        sampling: sampling settings; the runner sets seed and token limit for each turn.
        run_seed: seed of the run, from which the seeds of all episodes derive.
        options: number of episodes at once, retries, waits and history; and the condenser, user, score, done
            policy and group policy of all episodes, which arguments of the methods replace.
        sandbox: pool that lends each attempt at an episode a clean sandbox, in its `Context`. Without it
            `run_groups` opens the sandbox that the spec names.
        condenser: shortens conversations that come near the context's limit; it replaces that of `options`.
        full_outputs: directory to which the full text of each cut tool output is written.
        elsewhere: plays the groups in other processes; see `agentenv.workers`.
        processes: number of processes that play with runners of their own on the engine's servers.
        name: distinguishes the sessions of this runner on an engine that several runners use.

    Raises:
        UsageError: Engine and renderer do not fit together, or a number is out of range.
    """

    def __init__(
        self,
        engine: Engine | ChatEngine,
        renderer: Renderer | None = None,
        limits: RunLimits | None = None,
        *,
        sampling: Sampling | None = None,
        run_seed: int = 0,
        options: RunnerOptions | None = None,
        sandbox: SandboxPool | None = None,
        condenser: Condenser | None = None,
        full_outputs: str | Path | None = None,
        elsewhere: Elsewhere | None = None,
        processes: int = 1,
        name: str = "",
    ) -> None:
        chat = isinstance(engine, ChatEngine)
        if chat and renderer is not None:
            raise UsageError(f"{engine.name} only speaks text", remedy="pass no renderer")
        if not chat and renderer is None:
            raise UsageError(
                f"{engine.name} works on tokens and needs a renderer",
                remedy="pass the renderer of its tokenizer",
            )
        if sandbox is not None and not isinstance(sandbox, SandboxPool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"{type(sandbox).__name__} has no method lease(), so it cannot lend sandboxes",
                remedy="pass an agentenv.sandbox.Sandbox",
            )
        self.engine = engine
        self.renderer = renderer
        self.limits = limits or RunLimits()
        self.sampling = sampling or Sampling()
        self.run_seed = run_seed
        options = options or RunnerOptions()
        self.at_once = episodes_at_once(options.concurrency, engine, self.limits, processes=processes)
        if self.at_once.reason:
            log.info("%s", self.at_once.reason)
        if note := short_turns(features_of(engine), self.limits, self.sampling):
            log.info("%s", note)
        # The options get the parts themselves: another runner with them loads no model of theirs again.
        self.options = options = self._loaded(replace(options, condenser=condenser or options.condenser))
        self.condenser = cast("Condenser | None", options.condenser)
        self.ledger = Ledger()
        self.watchdog = Watchdog(warn_after_s=options.warn_after_s, grace_s=options.close_timeout_s)
        self._elsewhere = elsewhere
        self._shared = Shared(
            name=name,
            engine=engine,
            renderer=renderer,
            options=options,
            ledger=self.ledger,
            watchdog=self.watchdog,
            sandbox=sandbox,
            condenser=self.condenser,
            full_outputs=_outputs_in(full_outputs),
        )

    def _loaded(self, options: RunnerOptions) -> RunnerOptions:
        """Return the options with the condenser, user and score that they name."""
        if options.condenser is None and options.user is None and options.score is None:
            return options
        # These bring the model calls of users and summarisers with them, which few runs need.
        from agentenv.runner.named import PolicyModel, load_parts

        model = PolicyModel(self.engine, self.renderer, self.sampling.adapter)
        parts = load_parts(options.condenser, options.user, options.score, model)
        return replace(options, condenser=parts.condenser, user=parts.user, score=parts.score)

    def stage(
        self,
        spec: PlayableSpec,
        *,
        limits: RunLimits | None = None,
        sampling: Sampling | None = None,
        user: UserLike = None,
        done_policy: DonePolicy | None = None,
        score: Score | None = None,
        env_kwargs: Mapping[str, object] | None = None,
        close_envs: bool = True,
        one_object: bool = False,
    ) -> Stage:
        """Return a stage, which plays single episodes of an environment; `async with` opens it.

        Args:
            spec: specification that makes the environments, one for each attempt.
            limits: further limits; the strictest of these, the spec's and the runner's apply.
            sampling: sampling settings that replace the runner's.
            user: user that replaces the spec's.
            done_policy: policy that replaces the spec's.
            score: adds a reward to the environment's own reward.
            env_kwargs: keyword arguments for `spec.make`.
            close_envs: shut each environment down after its attempt.
            one_object: `spec.make` returns the same environment each time; see `Stage`.
        """
        sampling = sampling or self.sampling
        turn_tokens = None if sampling.max_tokens else features_of(self.engine).turn_tokens
        rules = Rules(
            env_id=spec.id,
            limits=self.limits.stricter(spec.limits).stricter(limits).filled(turn_tokens),
            sampling=sampling,
            done_policy=done_policy or self.options.done_policy or spec.done_policy,
            score=score or cast("Score | None", self.options.score),
        )
        return Stage(
            self._shared,
            spec,
            rules,
            run_seed=self.run_seed,
            user=cast("UserLike", self.options.user) if user is None else user,
            env_kwargs=env_kwargs,
            close_envs=close_envs,
            one_object=one_object,
        )

    async def run_episode(
        self,
        env: EpisodeEnv | Wrapped,
        task: TaskLike,
        *,
        seed: int | None = None,
        env_id: str | None = None,
        group_id: str | None = None,
        member: int = 0,
        limits: RunLimits | None = None,
        sampling: Sampling | None = None,
        user: UserLike = None,
        done_policy: DonePolicy | None = None,
        score: Score | None = None,
        close: bool = True,
    ) -> Trajectory:
        """Play one episode and return its record, whatever happens in it.

        The episode is played again only if infrastructure failed before the environment was begun, because an
        environment that an attempt has used cannot be made anew.

        Args:
            env: the environment, wrapped or not; this method begins, ends and closes it.
            task: the task to play.
            seed: seed of the environment; by default it derives from the run seed and the task.
            env_id: environment id for the record and the seeds; by default the class's name.
            group_id: group id for the record; by default made of environment and task.
            member: number of the episode in its group; the sampling seeds depend on it.
            limits: further limits; the stricter of these and the runner's apply.
            sampling: sampling settings that replace the runner's.
            user: simulated user that answers the model's text turns.
            done_policy: what happens when `is_done()` is true; by default `stop`.
            score: adds a reward to the environment's own reward.
            close: shut the environment down afterwards.
        """
        env = env.unwrapped if isinstance(env, Wrapped) else env
        spec = _OneEnv(env, env_id or type(env).__name__)
        task_id, data = read_task(task)
        group_id = group_id or f"{spec.id}:{task_id}"
        seed = derive_seed(self.run_seed, spec.id, task_id) if seed is None else seed
        stage = self.stage(
            spec,
            limits=limits,
            sampling=sampling,
            user=user,
            done_policy=done_policy,
            score=score,
            close_envs=False,
            one_object=True,
        )
        closing = Closing(self.options.close_timeout_s)
        try:
            async with stage:
                return await stage.play(Job(task_id, data, self.run_seed, group_id, seed), member)
        finally:
            if close:
                await closing.settle(closing.close(type(env).__name__, env.shutdown))

    def run_groups(
        self,
        spec: PlayableSpec,
        tasks: Iterable[TaskLike] | JobFeed,
        group_size: int = 1,
        *,
        round_index: int = 0,
        repeats: Iterable[int] | None = None,
        limits: RunLimits | None = None,
        sampling: Sampling | None = None,
        user: UserLike = None,
        done_policy: DonePolicy | None = None,
        score: Score | None = None,
        env_kwargs: Mapping[str, object] | None = None,
        policy: GroupPolicy | None = None,
        finished: Collection[tuple[str, int]] = (),
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> AsyncGenerator[TrajectoryGroup]:
        """Play a group of episodes for each task; yield the groups as they finish.

        Use `contextlib.aclosing` if the loop may be left early.

        Args:
            spec: specification that makes the environments, one for each attempt.
            tasks: the tasks to play; read when there is room, so the iterable may be endless. A `JobFeed`
                may get further groups while others are played.
            group_size: number of episodes of each task, which differ only in their sampling seeds.
            round_index: round of a training run; a task that is repeated in another round gets new seeds.
            repeats: how often each task came before in the round; by default counted over `tasks`.
            limits: further limits; the strictest of these, the spec's and the runner's apply.
            sampling: sampling settings that replace the runner's.
            user: user that replaces the spec's.
            done_policy: policy that replaces the spec's.
            score: adds a reward to the environment's own reward.
            env_kwargs: keyword arguments for `spec.make`.
            policy: what happens to failed members.
            finished: group id and member of episodes to leave out; a group without others is left out too.
            on_trajectory: called with each episode as it finishes.

        Raises:
            UsageError: Groups of this size cannot satisfy the policy.
        """
        stage = self.stage(
            spec,
            limits=limits,
            sampling=sampling,
            user=user,
            done_policy=done_policy,
            score=score,
            env_kwargs=env_kwargs,
        )
        fed = isinstance(tasks, JobFeed)
        jobs = tasks if fed else stage.jobs(tasks, round_index=round_index, repeats=repeats)
        policy = policy or self.options.group_policy
        return self._play(
            self._place(stage, user, score), jobs, group_size, policy, on_trajectory, finished=finished
        )

    def run_branches(
        self,
        spec: PlayableSpec,
        records: Iterable[Trajectory],
        group_size: int,
        *,
        from_turn: int,
        env_kwargs: Mapping[str, object] | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> AsyncGenerator[TrajectoryGroup]:
        """Continue each recorded episode several times from one of its turns; yield each as a group.

        The members of a group share the turns before `from_turn`: the environment plays them again, and their
        tokens are as recorded and not trained on. From there each member samples with seeds of its own. A
        member whose environment answers differently than recorded is aborted.

        Args:
            spec: specification that makes the environments, one for each member.
            records: the episodes; read when there is room.
            group_size: number of continuations of each episode.
            from_turn: number of recorded turns that the members share.
            env_kwargs: keyword arguments for `spec.make`.
            on_trajectory: called with each episode as it finishes.

        Raises:
            UsageError: An episode has no such turn, or has no tokens although the engine works on tokens.
        """
        fitting = records if self.renderer is None else map(_with_tokens, records)
        jobs = branches_of(fitting, from_turn, self.run_seed)
        stage = self._place(self.stage(spec, env_kwargs=env_kwargs))
        return self._play(stage, jobs, group_size, GroupPolicy(), on_trajectory)

    def _play(
        self,
        stage: PlaysJobs,
        jobs: Iterator[Job],
        group_size: int,
        policy: GroupPolicy,
        on_trajectory: Callable[[Trajectory], None] | None,
        *,
        finished: Collection[tuple[str, int]] = (),
    ) -> AsyncGenerator[TrajectoryGroup]:
        policy.check(group_size)
        return play_groups(
            stage,
            jobs,
            group_size=group_size,
            policy=policy,
            concurrency=self.at_once.number,
            finished=finished,
            on_trajectory=on_trajectory,
        )

    def _place(self, stage: Stage, user: UserLike = None, score: Score | None = None) -> PlaysJobs:
        """Return what plays the groups: the stage, or its counterpart in other processes."""
        if self._elsewhere is None:
            return stage
        if user is not None or score is not None:
            raise UsageError(
                f"{'a user' if user is not None else 'a score'} that is passed as an object cannot be sent "
                "to worker processes",
                remedy="name it in the runner's options, as in runner.score=file.py:name",
            )
        return self._elsewhere.stage(stage, self.ledger)


def _outputs_in(directory: str | Path | None) -> FullOutputs | None:
    if directory is None:
        return None
    from agentenv.runner.outputs import FullOutputs

    return FullOutputs(directory)


def _with_tokens(record: Trajectory) -> Trajectory:
    if not record.sequences:
        raise UsageError(
            f"member {record.member} of {record.group_id} has no tokens, so an engine that works on tokens "
            "cannot continue it",
            remedy="continue it with a chat engine",
        )
    return record


@dataclass(frozen=True, slots=True)
class _OneEnv:
    """The spec of an environment that already exists."""

    env: EpisodeEnv
    id: str
    done_policy: DonePolicy = "stop"
    limits: RunLimits | None = None
    user: object = None
    sandbox: str | None = None

    def make(self, **kwargs: object) -> EpisodeEnv:
        return self.env

    def prepare(self, **kwargs: object) -> AbstractAsyncContextManager[None]:
        return nullcontext()
