"""Play an environment with a scripted policy, without model and tokens, through the same core as in a run."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from agentenv.core.context import Context
from agentenv.core.episode_env import Action
from agentenv.core.messages import Message, ToolResult
from agentenv.core.playing import MessagePolicy
from agentenv.core.task import Task
from agentenv.envs.env import Env
from agentenv.envs.spec import EnvSpec

__all__ = ["MessagePolicy", "Played", "oracle_of", "play", "play_by_turns"]

MAX_TURNS = 64
"""Limit of turns for an environment that sets no limit."""


@dataclass(slots=True)
class Played:
    """An episode that a policy played."""

    task_id: str
    messages: list[Message] = field(default_factory=list[Message])
    tool_results: list[ToolResult] = field(default_factory=list[ToolResult])
    turn_rewards: list[float] = field(default_factory=list[float])
    reward: float | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    stop_reason: str = ""
    """Empty while the episode is being played."""
    reset_s: float = 0.0
    step_s: list[float] = field(default_factory=list[float])

    @property
    def story(self) -> tuple[object, ...]:
        """Everything that must be equal when the same episode is played again."""
        return (self.messages, self.turn_rewards, self.reward, dict(self.rewards), self.stop_reason)


async def play(
    entry: EnvSpec | Env, policy: MessagePolicy, task: Task | Mapping[str, object], *, seed: int = 0
) -> Played:
    """Play one episode to its end and close the environment.

    Args:
        entry: a specification, or an environment object.
        policy: function that returns the model's messages.
        task: the task to play.
        seed: seed of the environment and the policy.
    """
    async with aclosing(play_by_turns(entry, policy, task, seed=seed)) as turns:
        return [played async for played in turns][-1]


async def play_by_turns(
    entry: EnvSpec | Env, policy: MessagePolicy, task: Task | Mapping[str, object], *, seed: int = 0
) -> AsyncGenerator[Played]:
    """Play one episode and yield its state after each turn; the last state is the complete episode."""
    env = entry if isinstance(entry, Env) else entry.make()
    limit = (entry.max_turns if isinstance(entry, EnvSpec) else None) or MAX_TURNS
    data = task.data if isinstance(task, Task) else task
    played = Played(task.id if isinstance(task, Task) else "")
    rng = random.Random(seed)
    try:
        began = time.perf_counter()
        reset = await env.begin(data, seed=seed, context=Context(seed=seed))
        played.reset_s = time.perf_counter() - began
        played.messages.extend(reset.messages)
        yield played
        while not played.stop_reason:
            await _turn(env, policy, data, rng, played, last=len(played.turn_rewards) + 1 >= limit)
            if played.stop_reason:
                outcome = await env.end(played.stop_reason)
                played.rewards = outcome.rewards
                total = outcome.reward
                played.reward = None if total is None else total + sum(played.turn_rewards)
            yield played
    finally:
        await env.shutdown()


async def _turn(
    env: Env,
    policy: MessagePolicy,
    task: Mapping[str, object],
    rng: random.Random,
    played: Played,
    *,
    last: bool,
) -> None:
    message = policy(list(played.messages), task, rng)
    action = Action.of(await cast("Awaitable[Any]", message) if inspect.isawaitable(message) else message)
    played.messages.append(action.message)
    if last and action.tool_calls:
        # As in a run, calls are not made on the last turn, because the model could not read the answers.
        played.turn_rewards.append(0.0)
        played.stop_reason = "max_turns"
        return
    began = time.perf_counter()
    result = await env.advance(action)
    played.step_s.append(time.perf_counter() - began)
    played.tool_results.extend(result.tool_results)
    played.messages.extend(answer.to_message() for answer in result.tool_results)
    played.messages.extend(result.messages)
    played.turn_rewards.append(result.reward)
    if result.terminated:
        played.stop_reason = "env_terminated"
    elif result.truncated:
        played.stop_reason = "env_truncated"
    elif env.ends_on_text and not action.tool_calls:
        played.stop_reason = "final_answer"
    elif await env.is_finished():
        played.stop_reason = "env_done"
    elif last:
        played.stop_reason = "max_turns"


def oracle_of(entry: EnvSpec) -> MessagePolicy | None:
    """Return the policy that solves the environment's tasks; None if the author wrote none."""
    return entry.oracle
