"""Play our episodes on the sampler of another trainer, while it trains.

The trainer hands over a function that samples tokens; the runner, the limits, the tools and the rewards are
ours. The tokens that reach the trainer are those that its sampler returned.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from agentenv.core import RunLimits, Trajectory, UsageError
from agentenv.engine import Completion, Engine, Sampling, exact_completion, refuse_grammar
from agentenv.envs import EnvSpec
from agentenv.envs import spec as find_spec
from agentenv.render import ChatTokenizer, Renderer
from agentenv.runner import Runner, RunnerOptions
from agentenv_bridges.split import PromptResponse, split_sequence

__all__ = ["CallEngine", "Player", "SampleCall", "masked_row", "only_row", "rows_of"]

SampleCall = Callable[
    [list[int], Sampling, list[int], "str | None"], Awaitable[tuple[Sequence[int], Sequence[float] | None]]
]
"""Function of prompt, settings, stop tokens and session that returns tokens and their log-probabilities."""


class CallEngine(Engine):
    """An engine over a function that samples; what is kept for an episode is the trainer's sampler's."""

    def __init__(self, name: str, call: SampleCall) -> None:
        self.name, self._call = name, call

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        **_: Any,
    ) -> Completion:
        """Sample one completion; whether it stopped is read from its last token, because trainers differ.

        Raises:
            EngineError: There is not one log-probability for each token.
        """
        refuse_grammar(self.name, sampling)
        tokens, logprobs = await self._call(list(prompt_ids), sampling, list(stop_token_ids), session_id)
        return exact_completion(
            self.name,
            list(tokens),
            list(logprobs or ()),
            "abort" if not tokens else "stop" if tokens[-1] in stop_token_ids else "length",
            stop=stop_token_ids,
            max_tokens=sampling.token_limit,
            ranges=((0, 0, len(tokens)),),
        )


@dataclass(slots=True)
class Player:
    """Plays an environment for another trainer; it is made of names, so that it can be sent to workers."""

    env: str | EnvSpec
    tokenizer: Any
    """The trainer's tokenizer, or the directory of one."""
    limits: RunLimits = field(default_factory=RunLimits)
    runner: RunnerOptions | None = None
    counts: dict[str, int] = field(default_factory=dict[str, int])
    """Number of episodes by stop reason, failed ones included."""

    @property
    def renderer(self) -> Renderer:
        """The renderer of the model's chat."""
        return _renderer_of(self.tokenizer)

    async def play(
        self, engine: Any, task: Any, sampling: Sampling, *, seed: int = 0, member: int = 0
    ) -> Trajectory:
        """Play one episode of a task."""
        spec = find_spec(self.env) if isinstance(self.env, str) else self.env
        runner = Runner(
            engine, self.renderer, self.limits, options=self.runner, sampling=sampling, run_seed=seed
        )
        played = await runner.run_episode(spec.make(), task, seed=seed, member=member)
        reason = str(played.stop_reason)
        self.counts[reason] = self.counts.get(reason, 0) + 1
        return played


@lru_cache(maxsize=1)
def _renderer_of(tokenizer: Any) -> Renderer:
    return Renderer(
        ChatTokenizer.load(tokenizer) if isinstance(tokenizer, str) else ChatTokenizer.of(tokenizer)
    )


def rows_of(one: Trajectory) -> list[PromptResponse]:
    """Return the sequences of an episode that train; none if it failed or has no score."""
    if not one.trainable or one.reward is None:
        return []
    return [split_sequence(each) for each in one.sequences if each.num_trained_tokens]


def masked_row(renderer: Renderer) -> PromptResponse:
    """Return what stands for an episode that trains nothing: one masked token, as trainers take no fewer."""
    token = list(renderer.stop_token_ids[:1]) or [0]
    return PromptResponse(token, token, [False], [0.0], [0])


def only_row(one: Trajectory, host: str, renderer: Renderer) -> PromptResponse:
    """Return an episode for trainers that take one sequence each; see `masked_row` if it trains nothing.

    Raises:
        UsageError: The episode has several, because its history was rewritten.
    """
    rows = rows_of(one)
    if len(rows) > 1:
        raise UsageError(
            f"{host} takes one sequence for each episode, and the history of {one.task_id} was rewritten, "
            f"which makes {len(rows)}",
            remedy="leave out what rewrites it, such as runner.condenser and runner.history",
        )
    return rows[0] if rows else masked_row(renderer)
