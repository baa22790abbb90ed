"""Which tasks have a prompt that leaves no room to answer, found before the first step.

An episode is begun as it would be in training, with its user and its tools, and stopped where the model
would be asked; nothing is generated and nothing is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentenv.core.errors import EngineError
from agentenv.core.limits import RunLimits
from agentenv.core.task import Task
from agentenv.engine.base import Completion, Sampling
from agentenv.envs.registry import EnvSpec
from agentenv.runner.runner import Runner
from agentenv.train.config import GRPOConfig

__all__ = ["LongPrompt", "too_long"]


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """A task whose first prompt is over the limit."""

    task_id: str
    num_tokens: int
    limit: int


class _NoAnswer:
    """An engine that is asked and does not answer."""

    name = "the check of prompts"
    weights_version = 0
    max_context_tokens: int | None = None

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
    ) -> Completion:
        raise EngineError("only the prompt was wanted")

    async def release(self, session_id: str) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is held."""


async def too_long(
    runner: Runner, spec: EnvSpec, tasks: Sequence[Task], config: GRPOConfig
) -> list[LongPrompt]:
    """Return the tasks whose first prompt is over the limit; a task that fails to begin is none of them.

    Args:
        runner: what will play them.
        spec: their environment.
        tasks: to look at.
        config: `max_prompt_length` is a limit beside that of the context.
    """
    limits = runner.limits.stricter(spec.limits)
    limit = _limit(limits, runner.engine.max_context_tokens, config.max_prompt_length)
    if limit is None or not config.check_prompts or not tasks:
        return []
    # No limit of its own, so that the prompt is made and the episode ends unscored.
    asker = Runner(
        _NoAnswer(),
        runner.renderer,
        replace(runner.limits, max_context_tokens=None),
        options=runner.options,
        run_seed=config.seed,
    )
    free = None if spec.limits is None else replace(spec.limits, max_context_tokens=None)
    found: list[LongPrompt] = []
    async for group in asker.run_groups(replace(spec, limits=free), tasks):
        for one in group:
            length = len(one.sequences[0]) if one.sequences else 0
            if length > limit:
                found.append(LongPrompt(one.task_id, length, limit))
    return found


def _limit(limits: RunLimits, context: int | None, prompt: int | None) -> int | None:
    """Return the longest prompt that leaves room for an answer; None without any limit."""
    contexts = [bound for bound in (limits.max_context_tokens, context) if bound is not None]
    bounds = [bound - limits.min_answer_tokens for bound in contexts]
    if prompt is not None:
        bounds.append(prompt)
    return min(bounds, default=None)
