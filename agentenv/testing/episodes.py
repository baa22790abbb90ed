"""Play an environment with a scripted policy, without model and tokens, through the same core as in a run."""

from __future__ import annotations

import copy
import inspect
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, cast

from agentenv.core.episode_env import Action, Context, Task
from agentenv.core.messages import Message, ToolResult, copy_of
from agentenv.core.playing import MessagePolicy
from agentenv.envs.env import Env
from agentenv.envs.front import Front
from agentenv.envs.spec import EnvSpec
from agentenv.runner.users import User, UserLike, read_opening, read_turn, user_for

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
    seconds: float = 0.0
    """Time of the whole episode."""
    reset_s: float = 0.0
    step_s: list[float] = field(default_factory=list[float])
    tools: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    """Schemas of the tools that the episode began with."""

    @property
    def shown(self) -> list[Message]:
        """The messages before the model's first."""
        return list(takewhile(lambda message: message["role"] != "assistant", self.messages))

    @property
    def story(self) -> tuple[object, ...]:
        """Everything that must be equal when the same episode is played again."""
        return (self.messages, self.turn_rewards, self.reward, dict(self.rewards), self.stop_reason)


async def play(
    entry: EnvSpec | Env | Front[Env],
    policy: MessagePolicy,
    task: Task | Mapping[str, object],
    *,
    seed: int = 0,
    env: Env | None = None,
    context: Context | None = None,
) -> Played:
    """Play one episode to its end, with the simulated user of the specification.

    Args:
        entry: a specification, or an environment object, wrapped or not.
        policy: function that returns the model's messages.
        task: the task to play.
        seed: seed of the environment and the policy.
        env: environment of the specification to play in, which stays open; by default a new one is made and
            closed.
        context: what the environment is given, such as a sandbox; by default the seed alone.
    """
    async with aclosing(play_by_turns(entry, policy, task, seed=seed, env=env, context=context)) as turns:
        return [played async for played in turns][-1]


async def play_by_turns(
    entry: EnvSpec | Env | Front[Env],
    policy: MessagePolicy,
    task: Task | Mapping[str, object],
    *,
    seed: int = 0,
    env: Env | None = None,
    context: Context | None = None,
) -> AsyncGenerator[Played]:
    """Play one episode and yield its state after each turn; the last state is the complete episode."""
    spec = entry if isinstance(entry, EnvSpec) else None
    entry = entry.unwrapped if isinstance(entry, Front) else entry
    data = task.data if isinstance(task, Task) else task
    playing = _Episode(
        env or (entry if isinstance(entry, Env) else entry.make()),
        None if spec is None else user_for(cast("UserLike", spec.user), data),
        policy,
        data,
        random.Random(seed),
        (None if spec is None else spec.max_turns) or MAX_TURNS,
        None if spec is None or spec.limits is None else spec.limits.max_user_turns,
        Played(task.id if isinstance(task, Task) else ""),
    )
    began = time.perf_counter()
    try:
        await playing.begin(seed, context or Context(seed=seed))
        if playing.played.stop_reason:
            await playing.end()
        yield playing.played
        while not playing.played.stop_reason:
            await playing.turn()
            if playing.played.stop_reason:
                await playing.end()
                playing.played.seconds = time.perf_counter() - began
            yield playing.played
    finally:
        await playing.close(keep_env=env is not None)


@dataclass(slots=True)
class _Episode:
    """An episode being played, and who plays it."""

    env: Env
    user: User | None
    policy: MessagePolicy
    task: Mapping[str, object]
    rng: random.Random
    max_turns: int
    max_user_turns: int | None
    played: Played
    user_turns: int = 0

    async def begin(self, seed: int, context: Context) -> None:
        """Reset the environment, and let the user open the conversation."""
        began = time.perf_counter()
        reset = await self.env.begin(self.task, seed=seed, context=context)
        self.task = context.task or self.task  # as the environment declares its fields
        self.played.reset_s = time.perf_counter() - began
        self.played.tools = list(self.env.tool_schemas)
        self.played.messages.extend(reset.messages)
        if reset.terminated:
            self.played.stop_reason = "env_terminated"
        if self.user is not None:
            opening = read_opening(await self.user.start(copy.deepcopy(dict(self.task)), seed=seed))
            if opening:
                self.played.messages.append({"role": "user", "content": opening})

    async def turn(self) -> None:
        """Play one turn of the policy and its answer, and set the stop reason if the episode is over."""
        played = self.played
        last = len(played.turn_rewards) + 1 >= self.max_turns
        said = self.policy(list(played.messages), self.task, self.rng)
        action = Action.of(await cast("Awaitable[Any]", said) if inspect.isawaitable(said) else said)
        played.messages.append(action.message)
        if last and action.tool_calls:
            # As in a run, calls are not made on the last turn, because the model could not read the answers.
            played.turn_rewards.append(0.0)
            played.stop_reason = "max_turns"
            return
        began = time.perf_counter()
        result = await self.env.advance(action)
        played.step_s.append(time.perf_counter() - began)
        played.tool_results.extend(result.tool_results)
        played.messages.extend(answer.to_message() for answer in result.tool_results)
        played.messages.extend(result.messages)
        played.turn_rewards.append(result.reward)
        if result.terminated:
            played.stop_reason = "env_terminated"
        elif result.truncated:
            played.stop_reason = "env_truncated"
        elif self.env.ends_on_text and not action.tool_calls:
            played.stop_reason = "final_answer"
        elif await self.env.is_finished():
            played.stop_reason = "env_done"
        elif self.user is not None and not action.tool_calls:
            await self._ask_user(self.user)
        if last and not played.stop_reason:
            played.stop_reason = "max_turns"

    async def _ask_user(self, user: User) -> None:
        played = self.played
        if self.max_user_turns is not None and self.user_turns >= self.max_user_turns:
            played.stop_reason = "max_user_turns"
            return
        self.user_turns += 1
        answer = read_turn(await user.respond([copy_of(message) for message in played.messages]))
        played.turn_rewards[-1] += answer.reward
        for index, reward in answer.turn_rewards.items():
            played.turn_rewards[index] += reward
        if answer.text:
            played.messages.append({"role": "user", "content": answer.text})
        if answer.done:
            played.stop_reason = "user_done"

    async def end(self) -> None:
        """Score the episode."""
        outcome, played = await self.env.end(self.played.stop_reason), self.played
        played.rewards = outcome.rewards
        played.reward = None if outcome.reward is None else outcome.reward + sum(played.turn_rewards)

    async def close(self, *, keep_env: bool) -> None:
        """Close the user, and the environment unless it is to be kept."""
        if self.user is not None:
            await self.user.close()
        if not keep_env:
            await self.env.shutdown()


def oracle_of(entry: EnvSpec) -> MessagePolicy | None:
    """Return the policy that solves the environment's tasks; None if the author wrote none."""
    return entry.oracle
