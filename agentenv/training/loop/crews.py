"""The workers of a training: they play with the engine's servers, and are told of each change of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentenv.core.errors import UsageError
from agentenv.core.limits import RunLimits
from agentenv.engine.interface import Engine
from agentenv.envs.spec import EnvSpec
from agentenv.runner.options import RunnerOptions
from agentenv.training.learners.learner import Learner
from agentenv.training.loop.rollouts import PlayOptions, training_sampling
from agentenv.workers.recipe import Recipe
from agentenv.workers.start import crew_of

__all__ = ["with_crew"]


def with_crew(
    options: PlayOptions,
    learner: Learner,
    specs: Sequence[EnvSpec],
    driver: Engine,
    engine: Mapping[str, Any] | None,
) -> PlayOptions:
    """Return the options with the workers that the training asks for, which are not started yet.

    Args:
        options: options for playing the episodes.
        learner: the learner whose weights play.
        specs: the environments of the training.
        driver: the trainer's engine.
        engine: options of the engine.

    Raises:
        UsageError: The engine is not a server, or a part of the training cannot be sent to workers.
    """
    config = learner.config
    if not config.engine:
        raise UsageError(
            f"workers={config.workers}, but the model is in the trainer's process, which alone can use it",
            remedy="start a server and name it (engine='http://...'), or leave out the workers",
        )
    recipe = Recipe.of(
        specs,
        config.engine,
        runner=options.runner or RunnerOptions(),
        limits=options.limits or RunLimits(),
        sampling=training_sampling(learner),
        workers=config.workers,
        engine=engine,
        driver=driver,
        tokenizer=config.model or None,
        run_seed=config.seed,
        encode=options.callbacks.encode,
    )
    crew = crew_of(
        recipe,
        specs,
        workers=config.workers,
        ray=config.ray,
        tell=options.callbacks.on_workers,
        tell_servers=options.callbacks.on_servers,
        worker_env=config.worker_env,
        ray_options=config.ray_options,
    )
    return replace(options, crew=crew)
