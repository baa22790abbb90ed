"""tinker-cookbook plays our episodes live: an `EnvGroupBuilder` whose environments are episodes.

    from agentenv_bridges import group_builder

    builder = group_builder(env="shop.py", task={"item": "tea"}, tokenizer="/models/Qwen3-8B", group_size=8)

The cookbook samples and keeps the log-probabilities, and calls `step` with tokens. So the control is turned
round: the engine of the episode waits until the cookbook brings the tokens. Our own record of the episode has
no log-probabilities; it can be viewed and not trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

from agentenv.core import AgentEnvError, RunLimits, Trajectory
from agentenv.engine import Completion, Sampling
from agentenv_bridges.trainers.live import CallEngine, Player

__all__ = ["group_builder"]


def group_builder(
    *, env: str, task: Any, tokenizer: str, group_size: int, limits: RunLimits | None = None
) -> Any:
    """Return an `EnvGroupBuilder` of episodes of one task; it is made of names, because builders are pickled.

    A failed episode raises, and the cookbook's `RolloutStrategy` retries or drops it.

    Args:
        env: id or file of the environment.
        task: the fields of the task.
        tokenizer: directory of the tokenizer.
        group_size: number of episodes.
        limits: limits of each episode.
    """
    return _group(Player(env, tokenizer, limits or RunLimits()), task, group_size)


def _group(player: Player, task: Any, group_size: int) -> Any:
    """Return a builder; pickled builders are made of this function and its arguments."""
    return _group_type()(player, task, group_size)


class _Episode(CallEngine):
    """An episode that is its own engine: it goes on whenever the cookbook brings tokens."""

    def __init__(self, player: Player, task: Any, member: int) -> None:
        self.name = "tinker-cookbook"
        self._asked: asyncio.Queue[tuple[list[int], list[int], asyncio.Future[Completion]]] = asyncio.Queue()
        self._play = lambda: player.play(self, task, Sampling(), member=member)
        self._played: asyncio.Future[Trajectory] | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_token_ids: Sequence[int], **_: Any
    ) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((list(prompt_ids), list(stop_token_ids), answer))
        return await answer

    async def begin(self) -> tuple[list[int], list[int]]:
        """Return the first prompt with its stop tokens."""
        self._played = asyncio.ensure_future(self._play())
        first = await self._next(self._played)
        if first is None:
            raise AgentEnvError(f"the episode ended before the first turn: {self._played.result()!r}")
        return first

    async def go_on(self, action: list[int]) -> tuple[list[int], list[int]] | None:
        """Take the tokens of a turn; return the next prompt, or None at the end of the episode."""
        assert self._played is not None, "the episode has begun"
        reason = "stop" if action and action[-1] in self._stop else "length"
        made = Completion(tuple(action), (0.0,) * len(action), reason, sampled_by_policy=False)
        self._answer.set_result(made)
        return await self._next(self._played)

    async def _next(self, played: asyncio.Future[Trajectory]) -> tuple[list[int], list[int]] | None:
        asked = asyncio.ensure_future(self._asked.get())
        await asyncio.wait([asked, played], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            prompt, self._stop, self._answer = asked.result()
            return prompt, self._stop
        asked.cancel()
        one = self.record = played.result()
        if one.stop_reason.failed or one.reward is None:
            raise AgentEnvError(f"the episode failed: {one.stop_reason}: {one.error}")
        return None

    async def give_up(self) -> None:
        """End an episode that the cookbook has given up, so that its environment is closed."""
        if self._played is not None:
            self._played.cancel()
            await asyncio.wait([self._played])


@cache
def _group_type() -> Any:
    import tinker
    from tinker_cookbook.rl import types

    env_type: Any = types.Env
    group_type: Any = types.EnvGroupBuilder

    class AgentenvEnv(env_type):
        """One episode."""

        def __init__(self, *given: Any) -> None:
            self.episode = _Episode(*given)

        async def initial_observation(self) -> Any:
            prompt, stop = await self.episode.begin()
            return tinker.ModelInput.from_ints(prompt), stop

        async def step(self, action: list[int], *, extra: Any = None) -> Any:
            following = await self.episode.go_on(action)
            if following is not None:
                return types.StepResult(0.0, False, tinker.ModelInput.from_ints(following[0]), following[1])
            one = self.episode.record
            metrics = {f"stop/{one.stop_reason}": 1.0, "turns": float(len(one.turns))}
            metrics |= {f"reward/{name}": float(value or 0.0) for name, value in one.rewards.items()}
            return types.StepResult(float(one.reward or 0.0), True, tinker.ModelInput.empty(), [], metrics)

    class AgentenvGroup(group_type):
        """The episodes of one task."""

        def __init__(self, *given: Any) -> None:
            self.given, self.envs = given, []

        async def make_envs(self) -> Sequence[Any]:
            player, task, group_size = self.given
            made = [AgentenvEnv(player, task, member) for member in range(group_size)]
            self.envs += made  # a strategy that tries again calls this once more
            return made

        async def cleanup(self) -> None:
            envs, self.envs = self.envs, []
            await asyncio.gather(*(env.episode.give_up() for env in envs))

        def logging_tags(self) -> list[str]:
            return [str(self.given[0].env)]

        def __reduce__(self) -> Any:
            return _group, self.given

    return AgentenvGroup
