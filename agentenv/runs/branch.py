"""Branch stored episodes: continue each of them several times from one of its turns, as a group."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from agentenv.core.errors import UsageError
from agentenv.core.limits import RunLimits
from agentenv.core.settings import build
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.engine.factory import load_engine
from agentenv.engine.forms import LoadedModel
from agentenv.engine.interface import ChatEngine, Sampling
from agentenv.envs.registry import spec
from agentenv.render.renderer import Renderer
from agentenv.runner.options import RunnerOptions
from agentenv.runner.runner import Runner
from agentenv.runs.recorded import env_of, model_of, tokenizer_of
from agentenv.runs.store.reader import Run
from agentenv.runs.store.summary import EpisodeSummary
from agentenv.runs.store.writer import RunWriter

__all__ = ["Branching"]

_KEPT = ("env", "envs", "limits", "runner", "sampling")
"""Sections of the source's configuration that its branches are played with."""


@dataclass(frozen=True, kw_only=True)
class Branching:
    """Branches of a run's episodes that are ready to be played, with the run's own settings.

    Raises:
        UsageError: There is nothing to branch, or a number is out of range.
    """

    source: Run
    from_turn: int
    """Number of recorded turns that the branches of an episode share."""
    group_size: int
    """Number of branches of each episode."""
    seed: int = 0
    """Seed from which the sampling seeds of the branches derive."""
    episode: str = ""
    """Name of one episode, as `Run.find` takes it; empty for each that has the turn."""
    model: str = ""
    """Engine string of the model that continues; the run's own if empty."""
    env: str = ""
    """The environment to play in; the run's own if empty."""
    tokenizer: str = ""
    """Directory of the tokenizer; the run's own if empty."""

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise UsageError(f"the number of branches must be at least 1, not {self.group_size}")
        if not self.episodes:
            raise UsageError(
                f"no such episode of {self.source.id} has a turn {self.from_turn}",
                remedy="name a turn from 0 to the one before its last",
            )

    @cached_property
    def episodes(self) -> list[EpisodeSummary]:
        """The episodes that are branched."""
        named = [self.source.find(self.episode)] if self.episode else self.source.summaries
        return [summary for summary in named if 0 <= self.from_turn < summary.num_turns]

    def load_model(self) -> LoadedModel:
        """Load the model that continues; `play` closes it."""
        codec = self.tokenizer or tokenizer_of(self.source.info)
        return load_engine(self.model or model_of(self.source.info), tokenizer=codec or None)

    def new_run(self, runs_dir: str | Path) -> RunWriter:
        """Make the directory of the run that holds the branches."""
        info = self.source.info
        config: dict[str, Any] = {name: info.config[name] for name in _KEPT if name in info.config}
        if self.env:
            config |= {"envs": [self.env], "env": {}}
        config |= {
            "tokenizer": self.tokenizer or tokenizer_of(info) or None,
            "group_size": self.group_size,
            "branched_from": self.source.id,
            "from_turn": self.from_turn,
        }
        return RunWriter.create(
            "branches",
            kind="branch",
            runs_dir=runs_dir,
            env_ids=info.env_ids,
            model=self.model or model_of(info),
            seed=self.seed,
            config=config,
        )

    async def play(self, live: LoadedModel, writer: RunWriter | None = None) -> list[TrajectoryGroup]:
        """Play the branches and return the group of each episode; then close the model's engine.

        Args:
            live: the model that continues.
            writer: writes the branches to disk.
        """
        if writer is not None:
            writer.expect(len(self.episodes) * self.group_size)
            if live.tokenizer is not None:
                writer.keep_texts(live.tokenizer.backend)
        runner = Runner(
            live.engine,
            None if isinstance(live.engine, ChatEngine) else Renderer(live.tokenizer),
            build(RunLimits, self._section("limits")),
            sampling=build(Sampling, self._section("sampling")),
            run_seed=self.seed,
            options=build(RunnerOptions, self._section("runner")),
        )

        def take(trajectory: Trajectory) -> None:
            if writer is not None:
                writer.append(trajectory)

        groups: list[TrajectoryGroup] = []
        try:
            for env_id in dict.fromkeys(summary.env_id for summary in self.episodes):
                async with aclosing(self._branches_in(runner, env_id, take)) as playing:
                    groups += [group async for group in playing]
        finally:
            await live.engine.close()
        return groups

    def _branches_in(
        self, runner: Runner, env_id: str, take: Callable[[Trajectory], None]
    ) -> AsyncGenerator[TrajectoryGroup]:
        """Branch the episodes of one environment."""
        source = self.source
        return runner.run_branches(
            spec(self.env) if self.env else env_of(source.info, env_id),
            (source.load(summary) for summary in self.episodes if summary.env_id == env_id),
            self.group_size,
            from_turn=self.from_turn,
            env_kwargs={} if self.env else self._section("env"),
            on_trajectory=take,
        )

    def _section(self, name: str) -> dict[str, Any]:
        return dict(cast("Mapping[str, Any]", self.source.info.config.get(name) or {}))
