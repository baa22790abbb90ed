"""The wrapper through which users of Gymnasium see an environment.

`ae.make` and `gymnasium.make` put it around an environment. It plays the same asynchronous core as the
runner, and so makes the same checks, but synchronously and with the values of Gymnasium:

1. `reset` draws a task by its seed if `options["task"]` names none.
2. `step` takes a message or its text. If the episode ends there, the result of `finish` is added to the
   reward.
"""

# This is the other half of `Env`, and reads the author's own observation, which the runner has no use for.
# ruff: noqa: SLF001
# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
from collections.abc import Coroutine, Mapping
from typing import Any, Generic, TypeVar

import gymnasium

from agentenv.core.episode_env import ENV_SEEDS, Action, Context, StepResult
from agentenv.core.faults import frames_of
from agentenv.core.loops import run_sync
from agentenv.core.messages import Message
from agentenv.envs import spaces
from agentenv.envs.env import Env
from agentenv.envs.gym_values import messages_of
from agentenv.envs.tasks import task_from

__all__ = ["Front"]

Inner_co = TypeVar("Inner_co", bound=Env, covariant=True)


_T = TypeVar("_T")


class Front(gymnasium.Wrapper[Any, Any, Any, Any], Generic[Inner_co]):
    """An environment with Gymnasium's synchronous `reset`, `step` and `close`, and its checks.

    `unwrapped` is the author's own object, which the runner plays.
    """

    def __init__(self, env: Inner_co) -> None:
        super().__init__(env)
        self._inner = env

    @property
    def unwrapped(self) -> Inner_co:
        """The author's own object."""
        return self._inner

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; without `options["task"]` the seed draws a task.

        Raises:
            EnvironmentMisuse: The author's `reset` returned something else than text or messages.
        """
        env = self._inner
        gymnasium.Env.reset(env, seed=seed)
        rest = dict(options or {})
        context = rest.pop("context", None)
        if not isinstance(context, Context):
            context = Context()
        # Without a seed the episode gets one from the generator in its current state.
        context.seed = int(env.np_random.integers(ENV_SEEDS)) if seed is None else seed
        task = task_from(rest.pop("task", None), env.tasks, context.seed)
        observation, info = _run(env._begin(task, context.seed, context, rest))
        return self._shown(observation, first=True), info

    def step(self, action: str | Message) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Answer one message of the model, or its text.

        Raises:
            EnvironmentMisuse: No episode is being played, or the author's `step` returned something else
                than a step.
        """
        return _run(self._step_and_finish(Action.of(action)))

    def close(self) -> None:
        """Close the environment; may be called twice."""
        _run(self._inner.shutdown())

    async def _step_and_finish(self, action: Action) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = await self._inner.advance(action)
        reason = await self._stop_reason(action, result)
        reward, info = result.reward, dict(result.info)
        if reason:
            outcome = await self._inner.end(reason)
            reward += outcome.reward or 0.0
            info |= {"stop_reason": reason, "rewards": dict(outcome.rewards)}
            if outcome.reward is None:
                info["scorable"] = False
        shown = self._shown(result.observation, first=False)
        truncated = result.truncated and not result.terminated
        return shown, reward, bool(reason) and not truncated, truncated, info

    async def _stop_reason(self, action: Action, result: StepResult) -> str:
        if result.terminated:
            return "env_terminated"
        if result.truncated:
            return "env_truncated"
        if await self._inner.is_finished():
            return "env_done"
        return "final_answer" if self._inner.ends_on_text and not action.tool_calls else ""

    def _shown(self, observation: object, *, first: bool) -> object:
        """Return the author's observation; chat messages are copied and get the system prompt."""
        env = self._inner
        if not isinstance(env.observation_space, spaces.Chat):
            return observation
        messages = messages_of(observation, where=type(env).__name__)
        return copy.deepcopy(list(env._with_system_prompt(messages) if first else messages))


def _run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine; an exception of the author's code shows the author's frames first."""
    try:
        return run_sync(coroutine)
    except Exception as error:  # noqa: BLE001 - it is raised again
        raise error.with_traceback(frames_of(error))  # noqa: B904 - it has its cause already
