"""Find, before the first step, the tasks whose prompt leaves no room for an answer.

Each task's episode is started as in training, with its user and its tools, and stopped at the first request
to the model. Nothing is generated and nothing is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentenv.core.episode_env import Task
from agentenv.core.errors import EngineError
from agentenv.core.images import ImageTokens
from agentenv.core.limits import least
from agentenv.engine.interface import Completion, Engine, Features, Sampling
from agentenv.envs.registry import EnvSpec
from agentenv.runner.runner import Runner
from agentenv.training.config import GRPOConfig

__all__ = ["LongPrompt", "too_long"]


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """A task whose first prompt is over the limit."""

    task_id: str
    num_tokens: int
    limit: int


class _NoAnswer(Engine):
    """An engine that raises on every request."""

    name = "the check of prompts"

    @property
    def features(self) -> Features:
        """It takes prompts with images, as any other."""
        return Features(images=True)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
        images: Sequence[ImageTokens] = (),
    ) -> Completion:
        raise EngineError("this engine only checks prompts and generates nothing")


async def too_long(
    runner: Runner, spec: EnvSpec, tasks: Sequence[Task], config: GRPOConfig
) -> list[LongPrompt]:
    """Return the tasks whose first prompt is over the limit, without tasks that fail to start.

    Args:
        runner: the runner that will play the tasks.
        spec: the environment of the tasks.
        tasks: the tasks to check.
        config: the run's options. `max_prompt_length` is a limit in addition to that of the context, and the
            only one if a condenser shortens first prompts. It counts the tokens before that.
    """
    limits = runner.limits.stricter(spec.limits)
    condensed = runner.condenser is not None and runner.condenser.opening
    limit = config.sampling.max_prompt_length
    assert limit is not None  # the caller checks nothing without a limit
    if not tasks:
        return []
    context = least(limits.max_context_tokens, runner.engine.max_context_tokens)
    if context is not None and not condensed:
        limit = min(limit, context - limits.min_answer_tokens)
    # Without a context limit the prompt is always rendered, and the episode ends unscored.
    asker = Runner(
        _NoAnswer(),
        runner.renderer,
        replace(runner.limits, max_context_tokens=None),
        options=runner.options,
        run_seed=config.seed,
    )
    free = None if spec.limits is None else replace(spec.limits, max_context_tokens=None)
    long_prompts: list[LongPrompt] = []
    async for group in asker.run_groups(replace(spec, limits=free), tasks):
        for trajectory in group:
            length = len(trajectory.sequences[0]) if trajectory.sequences else 0
            if length > limit:
                long_prompts.append(LongPrompt(trajectory.task_id, length, limit))
    return long_prompts
