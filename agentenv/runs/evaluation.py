"""Play the tasks of an evaluation, store every episode, and report the results.

An evaluation follows two rules:

1. Every finished episode is written before it is counted. A stopped run can be resumed: it plays no
   finished episode again and ends with the same results as an uninterrupted run, because every seed is
   derived from the task and the member.
2. The evaluation stops early if the first tasks of an environment all fail with the same error while no
   episode has succeeded, and it reports that error. The first tasks are the first in the order of the task
   set, whichever finish first.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv.core.episode_env import Task
from agentenv.core.errors import AgentEnvError, UsageError
from agentenv.core.seats import game_of
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.core.visible import one_line, visible
from agentenv.engine.factory import load_engine
from agentenv.engine.interface import ChatEngine, Engine, Features, features_of
from agentenv.envs.advice import tell_if_alike
from agentenv.envs.registry import EnvSpec, spec
from agentenv.runner.options import episodes_at_once, short_turns
from agentenv.runner.runner import Runner
from agentenv.runs.eval_config import EvalConfig
from agentenv.runs.report import EvalReport, report_on
from agentenv.runs.store.summary import ENCODE, EpisodeKey, EpisodeSummary, summarize, with_played
from agentenv.runs.terms import terms_of

if TYPE_CHECKING:
    from agentenv.runner.watchdog import Waiting
    from agentenv.runs.store.reader import Run
    from agentenv.runs.store.writer import RunWriter
    from agentenv.workers.crew import Crew

__all__ = ["EvalResult", "Evaluation"]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Result of an evaluation: the report and the episodes."""

    report: EvalReport
    summaries: tuple[EpisodeSummary, ...]
    groups: tuple[TrajectoryGroup, ...] = ()
    """The episodes in groups; empty if they were written to disk."""
    run: Run | None = None
    """The run on disk; None if the episodes were kept in memory."""
    stopped: str = ""
    """The reason why the evaluation ended early; empty if it did not."""

    def __repr__(self) -> str:
        stopped = f"stopped: {self.stopped}" if self.stopped else ""
        return one_line(self, None if self.run is None else f"run {self.run.id}", stopped, repr(self.report))

    def __str__(self) -> str:
        run = [f"run {self.run.id}"] if self.run is not None else []
        stopped = [visible(f"stopped: {self.stopped}")] if self.stopped else []
        return "\n".join([*run, str(self.report), *stopped])


class Evaluation:
    """An evaluation that is ready to be played.

    Args:
        config: the configuration.
        specs: the environments, if they are already loaded; otherwise they are found by `config.envs`.
    """

    def __init__(
        self,
        config: EvalConfig,
        *,
        specs: Sequence[EnvSpec] = (),
    ) -> None:
        self.config = config
        if config.workers or config.ray:
            from agentenv.workers.start import check_workers

            check_workers(config.workers, config.ray, config.model)
        config.runner.check_imports()
        self.specs = tuple(specs) or tuple(spec(name) for name in config.envs)
        # The same objects again, because what a function makes is asked for its tasks once an object.
        self._with_kwargs = [entry.with_kwargs(config.env) for entry in self.specs]
        for entry in self._with_kwargs:
            entry.check_kwargs()
            if config.model == "oracle":
                entry.require_oracle()
        self.tasks = [_tasks_of(entry, config) for entry in self._with_kwargs]
        self._model = load_engine(config.model, tokenizer=config.tokenizer, **config.engine)
        self.at_once = episodes_at_once(config.runner.concurrency, self._model.engine, config.limits)
        """How many episodes are played at once, and why."""
        self._options = config.runner
        self._runner: Runner | None = None
        self.crew: Crew | None = None
        """The workers that play the episodes while `play` runs; None if this process plays them."""
        self.on_episode: Callable[[EpisodeSummary], None] | None = None
        """Called with the summary of each finished episode."""
        self.on_begin: Callable[[], None] = lambda: None
        """Called when the workers, if there are any, have started."""
        self._writer: RunWriter | None = None
        self._finished: set[EpisodeKey] = set()
        self.earlier: list[EpisodeSummary] = []
        """The episodes that an earlier, stopped run finished."""
        self._groups: list[TrajectoryGroup] = []
        self._summaries: list[EpisodeSummary] = []
        self._first: dict[EpisodeKey, str | None] = {}
        """What the errors of the first episodes have in common, None until they finish; if all have the same,
        the evaluation stops."""
        self._succeeded = False
        self.stopped = ""

    def keep_in(self, writer: RunWriter) -> None:
        """Write the episodes to a run and not keep them; those that it has are not played again."""
        self._writer = writer
        self._finished = writer.finished
        self.earlier = [summary for summary in writer.summaries if summary.key in self._finished]
        self._succeeded = any(not summary.error for summary in self.earlier)

    @property
    def num_episodes(self) -> int:
        """Number of all episodes, including those that an earlier run finished."""
        return sum(map(len, self.tasks)) * self.config.group_size

    @cached_property
    def terms(self) -> tuple[str, ...]:
        """Tasks, sampling, user and scorer, which a mean is shown with."""
        short = [f"turns of at most {self.most_turn_tokens} tokens"] if self.short_turns else []
        return (*terms_of(self._with_kwargs, self.tasks, self.config), *short)

    @property
    def most_turn_tokens(self) -> int:
        """Tokens that end a turn of an episode whose environment does not limit them."""
        config = self.config
        return config.limits.max_tokens_per_turn or config.sampling.max_tokens or self._features.turn_tokens

    @property
    def short_turns(self) -> str:
        """What to say of turns that end early because the model is small; empty if somebody limited them."""
        if all(entry.limits and entry.limits.max_tokens_per_turn for entry in self.specs):
            return ""
        return short_turns(self._features, self.config.limits, self.config.sampling)

    @property
    def sampled(self) -> Callable[[], int] | None:
        """Returns how many tokens were sampled, unfinished ones too; None if that is not known."""
        return None if self.config.workers else self._features.sampled

    @property
    def _features(self) -> Features:
        return features_of(self._model.engine)

    @property
    def num_finished(self) -> int:
        """Number of episodes that an earlier, stopped run finished."""
        return len(self._finished)

    def waiting(self) -> list[Waiting]:
        """Return what the episodes being played wait for; any thread may call this."""
        return [] if self._runner is None else self._runner.watchdog.waiting()

    async def play(self) -> EvalResult:
        """Play the episodes that are not finished yet and return the result.

        A new run whose workers cannot start is removed.

        Raises:
            UsageError: The workers cannot start.
            StoreError: An episode could not be written; the earlier ones are kept.
        """
        engine, tokenizer = self._model.engine, self._model.tokenizer
        try:
            if self._writer is not None:
                self._writer.expect(self.num_episodes)
                if tokenizer is not None:
                    self._writer.keep_texts(tokenizer.backend, tokenizer.image_settings)
            async with self._hired(), self._watched():
                self.on_begin()
                for entry, tasks in zip(self.specs, self.tasks, strict=True):
                    # Iterate here and not in a helper: every coroutine above the engine costs time.
                    async with aclosing(self._groups_of(entry, tasks, engine, tokenizer)) as groups:
                        async for group in groups:
                            if self._writer is None:
                                self._groups.append(group)
                            if self.stopped:
                                return self.result()
        finally:
            await engine.close()
        return self.result()

    @asynccontextmanager
    async def _hired(self) -> AsyncGenerator[None]:
        """Keep the workers of the run in this context; a new run whose workers cannot start is removed."""
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._workers())
            except AgentEnvError:
                if self._writer is not None:
                    self._writer.discard()
                raise
            yield

    def _workers(self) -> AbstractAsyncContextManager[object]:
        """Return the context in which the workers of the run live."""
        config = self.config
        if not config.workers or self.num_finished == self.num_episodes:
            return nullcontext()
        from agentenv.workers.recipe import Recipe
        from agentenv.workers.start import crew_of

        recipe = Recipe.of(
            self.specs,
            config.model,
            runner=config.runner,
            limits=config.limits,
            sampling=config.sampling,
            tokenizer=config.tokenizer,
            workers=config.workers,
            engine=config.engine,
            driver=self._model.engine,
            run_seed=config.seed,
            full_outputs=None if self._outputs is None else str(self._outputs.resolve()),
            encode="" if self._writer is None else ENCODE,
        )
        writer = self._writer
        self.crew = crew_of(
            recipe,
            self.specs,
            workers=config.workers,
            ray=config.ray,
            worker_env=config.worker_env,
            ray_options=config.ray_options,
            tell=None if writer is None else writer.log_workers,
            tell_servers=None if writer is None else writer.log_servers,
        )
        return self.crew

    def _watched(self) -> AbstractAsyncContextManager[object]:
        """Return the context in which the servers that this process uses are reported; workers do it else."""
        engine, writer = self._model.engine, self._writer
        if writer is None or self.config.workers or not features_of(engine).servers():
            return nullcontext()
        from agentenv.workers.reports import reporting_servers

        return reporting_servers(engine, writer.log_servers)

    def servers(self) -> list[dict[str, Any]]:
        """Return how the servers of the engine are doing; any thread may call this."""
        if self.crew is not None:
            return self.crew.server_rows()
        rows = features_of(self._model.engine).servers()
        if not rows:
            return []
        from agentenv.workers.servers import together

        return together(rows)

    @property
    def _outputs(self) -> Path | None:
        """Directory of the full tool outputs; None if no run is written."""
        return None if self._writer is None else self._writer.path / "outputs"

    def result(self) -> EvalResult:
        """Return the result of the episodes that are finished so far."""
        keys = [
            (entry.id, task.id) for entry, tasks in zip(self.specs, self.tasks, strict=True) for task in tasks
        ]
        order = {key: index for index, key in enumerate(keys)}
        finished = self._writer.summaries if self._writer else self._summaries
        summaries = sorted(
            finished,
            key=lambda summary: (
                order.get((summary.env_id, game_of(summary.task_id)), len(order)),
                summary.task_id,
                summary.member,
            ),
        )
        groups = sorted(
            self._groups,
            key=lambda group: order.get((group[0].env_id, game_of(group[0].task_id)), len(order)),
        )
        run = None
        if self._writer is not None:
            from agentenv.runs.store.reader import Run

            run = Run(self._writer.path)
        spent = features_of(self._model.engine).metrics() if self.crew is None else self.crew.spent()
        terms = with_played(self.terms, summaries, self.num_episodes)
        report = report_on(summaries, success_at=self.config.success_at, terms=terms)
        report = replace(report, spent=spent)
        return EvalResult(report, tuple(summaries), tuple(groups), run, self.stopped)

    def _groups_of(
        self, entry: EnvSpec, tasks: Sequence[Task], engine: Engine | ChatEngine, tokenizer: Any
    ) -> AsyncGenerator[TrajectoryGroup]:
        """Play the tasks of one environment, except the members that an earlier run finished."""
        config = self.config
        members = range(config.group_size)
        in_order = (
            (entry.id, task.id, f"{entry.id}:{task.id}", member) for member in members for task in tasks
        )
        first = list(islice(in_order, config.stop_after_failures))
        self._first = {} if self._finished.intersection(first) else dict.fromkeys(first)
        runner = self._runner = Runner(
            engine,
            None if tokenizer is None else importlib.import_module("agentenv.render").Renderer(tokenizer),
            config.limits,
            options=self._options,
            sampling=config.sampling,
            run_seed=config.seed,
            full_outputs=self._outputs,
            elsewhere=self.crew,
        )
        self._options = runner.options  # the next environment uses the same parts, loaded once
        return runner.run_groups(
            entry,
            tasks,
            config.group_size,
            env_kwargs=config.env,
            finished={
                (group_id, member) for env_id, _, group_id, member in self._finished if env_id == entry.id
            },
            on_trajectory=self._take,
        )

    def _take(self, trajectory: Trajectory) -> None:
        if self._writer is not None:
            encoded = None if self.crew is None else self.crew.encoded(trajectory)
            summary = self._writer.append(trajectory, encoded)
        else:
            summary = summarize(trajectory)
            self._summaries.append(summary)
        self._watch_first(summary)
        if self.on_episode is not None:
            self.on_episode(summary)

    def _watch_first(self, summary: EpisodeSummary) -> None:
        self._succeeded |= not summary.error
        if self._succeeded:
            self.stopped = ""  # others were on their way when the first had failed
        if self._succeeded or summary.key not in self._first:
            return
        # Errors are the same if they were raised at the same place, because their texts may name the task, or
        # else if their texts are, but for what varies.
        where, text = summary.failure
        self._first[summary.key] = where or text
        errors = [error or "" for error in self._first.values()]
        if "" not in errors and len(set(errors)) == 1:
            first = f"first {len(errors)} episodes all" if len(errors) > 1 else "first episode"
            self.stopped = f"the {first} failed with the same error: {summary.error}"


def _tasks_of(entry: EnvSpec, config: EvalConfig) -> list[Task]:
    tasks = entry.task_set()
    tasks = tasks.split(config.split or tasks.held_out or tasks.split_name)
    if config.num_tasks is None and tasks.endless:
        raise UsageError(
            f"the task set of {entry.id} is endless", remedy="set the number of tasks with num_tasks (-n)"
        )
    chosen = list(tasks) if config.num_tasks is None else tasks.take(config.num_tasks)
    if not chosen:
        others = ", ".join(name for name in tasks.splits if name != tasks.split_name)
        raise UsageError(
            f"{entry.id} has no tasks in its split {tasks.split_name!r}",
            remedy=f"name another split: {others}" if others else "register it with tasks",
        )
    tell_if_alike(entry.id, chosen)
    return chosen
