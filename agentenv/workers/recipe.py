"""The recipe of a run: JSON from which any process opens the same stages as the driver."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import ceil
from pathlib import Path
from typing import Any

from agentenv.core.errors import UsageError
from agentenv.core.limits import RunLimits
from agentenv.core.settings import build
from agentenv.engine.factory import load_engine
from agentenv.engine.forms import LoadedModel
from agentenv.engine.interface import Sampling, features_of
from agentenv.engine.listed import names_servers
from agentenv.engine.packaged import PACKAGED
from agentenv.envs.origin import find_again, origin_of
from agentenv.envs.spec import EnvSpec
from agentenv.render.renderer import Renderer
from agentenv.runner.options import RunnerOptions
from agentenv.runner.runner import Runner

__all__ = ["Recipe", "require_remote"]

SERVER_CONCURRENCY = 256
"""Requests that one process has in flight to each server, if the options of the engine say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that a worker needs to play episodes of a run."""

    envs: tuple[str, ...]
    """Where each environment is found; see `agentenv.envs.origin`."""
    model: str
    """Engine string, such as the addresses of servers."""
    tokenizer: str | None = None
    """Directory of the tokenizer; None means the model's own."""
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of the engine."""
    limits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    runner: Mapping[str, Any] = field(default_factory=dict[str, Any])
    run_seed: int = 0
    full_outputs: str | None = None
    """Directory for the full text of cut tool outputs; it is not used where it does not exist."""
    encode: str = ""
    """Name (`module:function`) of what workers make of each record for the driver; none if empty."""
    directory: str = ""
    """Working directory of the driver, to which the paths of files are relative."""
    path: tuple[str, ...] = ()
    """Directories in which the driver finds modules."""

    @classmethod
    def of(
        cls,
        specs: Sequence[EnvSpec],
        model: str,
        *,
        runner: RunnerOptions,
        limits: RunLimits,
        sampling: Sampling,
        workers: int = 1,
        engine: Mapping[str, Any] | None = None,
        driver: object = None,
        **values: Any,
    ) -> Recipe:
        """Write the recipe of a run in this process.

        Args:
            specs: the environments.
            model: engine string.
            runner: options of the runner, whose parts must be named.
            limits: limits of each episode.
            sampling: sampling settings.
            workers: number of workers, which share the requests that each server may have in flight.
            engine: options of the engine.
            driver: the driver's engine, which may have examined the servers.
            values: further fields of the recipe.

        Raises:
            UsageError: The model is in this process only, or a part of the run has no importable name.
        """
        require_remote(model)
        recipe = cls(
            envs=tuple(map(origin_of, specs)),
            model=model,
            engine=_shared(model, dict(engine or {}), workers, driver),
            limits=asdict(limits),
            sampling=asdict(sampling),
            runner=runner.record(),
            directory=str(Path.cwd()),
            path=tuple(str(Path(entry or ".").resolve()) for entry in sys.path),
            **values,
        )
        RunnerOptions(**{name: recipe.runner[name] for name in ("condenser", "user", "score")})
        recipe.to_json()
        return recipe

    def to_json(self) -> str:
        """Return the recipe as JSON text.

        Raises:
            UsageError: An option of the engine or of a part is no JSON value.
        """
        try:
            return json.dumps({item.name: getattr(self, item.name) for item in fields(self)})
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"a setting of this run cannot be sent to worker processes: {error}",
                remedy="use texts, numbers, lists and tables",
            ) from error

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Read the text that `to_json` returned."""
        values: dict[str, Any] = json.loads(text)
        values |= {name: tuple(values[name]) for name in ("envs", "path")}
        return cls(**values)

    def enter_directory(self) -> None:
        """Use the driver's working directory and its places of modules, as far as they exist here."""
        if self.directory and Path(self.directory).is_dir():
            os.chdir(self.directory)
        sys.path += [entry for entry in self.path if entry not in sys.path]

    def load_specs(self) -> list[EnvSpec]:
        """Find the environments, which imports their modules and files."""
        return [find_again(origin) for origin in self.envs]

    def load_runner(self, *, name: str = "") -> Runner:
        """Load the engine and return a runner.

        Args:
            name: name of the runner, which begins the numbers of its sessions.
        """
        model: LoadedModel = load_engine(self.model, tokenizer=self.tokenizer, **self.engine)
        outputs = self.full_outputs if self.full_outputs and Path(self.full_outputs).parent.is_dir() else None
        return Runner(
            model.engine,
            None if model.tokenizer is None else Renderer(model.tokenizer),
            build(RunLimits, self.limits),
            options=build(RunnerOptions, self.runner),
            sampling=build(Sampling, self.sampling),
            run_seed=self.run_seed,
            full_outputs=outputs,
            name=name,
        )


def _shared(model: str, options: dict[str, Any], workers: int, driver: object) -> dict[str, Any]:
    """Return the options of the engine of one worker; all workers together have the budget of one process."""
    if names_servers(model):
        options["concurrency"] = ceil(int(options.get("concurrency", SERVER_CONCURRENCY)) / workers)
    if examined := features_of(driver).examined():
        options["examined"] = examined
    return options


def require_remote(model: str) -> None:
    """Refuse a model that the driver itself would hold.

    Raises:
        UsageError: Every worker would load the model again.
    """
    kind = "hf" if model in PACKAGED else model.partition(":")[0]
    if kind in {"hf", "vllm"}:
        raise UsageError(
            f"{model} cannot be used with workers, because each of them would load the model again",
            remedy="start a server (vllm serve PATH) and name its address, or leave out the workers",
        )
