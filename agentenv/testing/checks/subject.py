"""The input of every check (`Subject`), and the exceptions with which a check ends."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from agentenv.core.episode_env import Context, Task, derive_seed
from agentenv.core.errors import AgentEnvError
from agentenv.core.limits import RunLimits
from agentenv.core.messages import Message, text_of
from agentenv.engine.scripted.mock import arguments_for
from agentenv.envs.agent_env import AgentEnv
from agentenv.envs.env import Env
from agentenv.envs.spec import EnvSpec
from agentenv.runner.options import RunnerOptions
from agentenv.sandbox.sandbox import Sandbox
from agentenv.testing.calls import tool_call_message
from agentenv.testing.episodes import MessagePolicy, Played, oracle_of, play
from agentenv.testing.fuzz import random_call

__all__ = [
    "CHECK_LIMITS",
    "Problem",
    "Skipped",
    "Subject",
    "function_of",
    "random_policy",
    "thread_hint",
    "too_long",
]


CHECK_LIMITS = {"max_turns": 4, "max_tokens_per_turn": 64, "max_context_tokens": 65_536}
"""Limits of the episodes that the runner plays, if the caller sets none."""


SLOW_S = 1.0
"""Seconds of an episode from which an environment is slow: checks play less of it, and several at once."""
SLOW_AT_ONCE = 4
RANDOM_TURNS = 6
"""Turns in which the random policy calls tools."""


class Problem(Exception):
    """Something is wrong with the environment."""


class Skipped(Exception):
    """The check does not apply to the environment."""


@dataclass
class Subject:
    """The environment being checked, the options of the checks, and the episodes played so far."""

    entry: EnvSpec
    tasks: int | None
    """Limit of the number of tasks of each split; None means all."""
    fuzz_calls: int
    seed: int
    trivial_limit: float | None
    """Share of the full marks that a trivial policy may get; None means the environment's own limit."""
    runner: RunnerOptions
    """Options of the runner that plays episodes of the environment."""
    limits: RunLimits
    """Limits of the episodes that the runner plays."""
    sandbox: Sandbox | None = None
    """Sandbox that the specification names, which all checks share; each episode gets a clean lease."""
    check_s: float = 120.0
    """Time limit of one check."""
    began: float = field(default_factory=time.monotonic)
    """Time at which the current check began, by `time.monotonic()`."""
    plays: list[Played] = field(default_factory=list[Played])
    firsts: dict[tuple[str, str], Played] = field(default_factory=dict[tuple[str, str], Played])
    """The first play of each policy of `policies` on each task."""

    def some_tasks(self) -> list[Task]:
        """Return the tasks to play: the first ones of each split."""
        tasks = self.entry.task_set()
        names = sorted(tasks.splits, key=lambda name: name != tasks.split_name)
        chosen = [task for name in names for task in self.tasks_of(name)]
        if not chosen:
            raise Problem("the environment has no tasks")
        return chosen

    @property
    def is_agent(self) -> bool:
        """True if an agent with a loop of its own asks the model, so that nothing can be stepped."""
        target = self.entry.load()
        return isinstance(target, type) and issubclass(target, AgentEnv)

    def tasks_of(self, split: str) -> list[Task]:
        """Return the tasks of a split that are played."""
        tasks = self.entry.task_set(split)
        if self.tasks is not None:
            return tasks.take(self.tasks)
        if tasks.endless:
            raise Problem(f"the split {split} is endless; name a number of tasks with -n")
        return list(tasks)

    @property
    def is_slow(self) -> bool:
        """True if an episode takes seconds, as in a container."""
        return bool(self.plays) and fmean(played.seconds for played in self.plays) > SLOW_S

    def few_tasks(self, number: int | None = None) -> list[Task]:
        """Return a few of the tasks to play, spread over all of them; None means all.

        Of a slow environment there are at most two.
        """
        tasks = self.some_tasks()
        number = min(number or len(tasks), 2 if self.is_slow else len(tasks))
        return (
            [tasks[index * len(tasks) // number] for index in range(number)] if number < len(tasks) else tasks
        )

    def in_time(self, tasks: Sequence[Task], share: float = 1.0) -> Iterator[Task]:
        """Yield the tasks, in an order drawn by the seed, until a share of the check's time has passed.

        One task is always yielded. A part of the time is left over for the last task and for what follows.

        Args:
            tasks: the tasks.
            share: the share of the time, counted from the beginning of the check.
        """
        until = self.began + 0.6 * share * self.check_s
        for index, task in enumerate(random.Random(self.seed).sample(tasks, len(tasks))):
            if index and time.monotonic() > until:
                return
            yield task

    @asynccontextmanager
    async def context(self, seed: int = 0) -> AsyncGenerator[Context]:
        """Yield the context of an episode, as the runner gives it."""
        if self.sandbox is None:
            yield Context(seed=seed)
            return
        async with self.sandbox.lease() as lent:
            yield Context(seed=seed, sandbox=lent)

    def seed_of(self, task: Task) -> int:
        """Return the seed of a task's episode."""
        return derive_seed(self.seed, task.id)

    async def play(self, policy: MessagePolicy, task: Task, *, env: Env | None = None) -> Played:
        """Play a task, in a new environment unless one is given; an exception names the task."""
        try:
            seed = self.seed_of(task)
            async with self.context(seed) as context:
                played = await play(self.entry, policy, task, seed=seed, env=env, context=context)
        except AgentEnvError as error:
            raise Problem(f"task {task.id}: {error}") from error
        except Exception as error:
            error.args = (f"task {task.id}: {error}",)
            raise
        self.plays.append(played)
        return played

    async def play_first(self, name: str, policy: MessagePolicy, task: Task) -> Played:
        """Play a task by one of `policies`; of a slow environment the first such play stands for all."""
        known = self.firsts.get((name, task.id))
        if known is None or not self.is_slow:
            known = self.firsts[name, task.id] = await self.play(policy, task)
        return known

    async def play_each(
        self, jobs: Iterable[tuple[MessagePolicy, Task]]
    ) -> list[tuple[MessagePolicy, Played]]:
        """Play tasks until there are no more, several at once where an episode takes seconds."""
        rest, played = iter(jobs), list[tuple[MessagePolicy, Played]]()

        async def play_rest() -> None:
            for policy, task in rest:
                played.append((policy, await self.play(policy, task)))

        players = [asyncio.ensure_future(play_rest()) for _ in range(SLOW_AT_ONCE if self.is_slow else 1)]
        try:
            await asyncio.gather(*players)
        finally:
            for player in players:
                player.cancel()
            await asyncio.gather(*players, return_exceptions=True)
        return played

    def policies(self) -> dict[str, MessagePolicy]:
        """Return the oracle, if there is one, and a policy that calls random tools and then answers.

        A slow environment is played by one of them.
        """
        oracle = oracle_of(self.entry)
        if oracle is not None and self.is_slow:
            return {"oracle": oracle}
        chance = random_policy(self.entry.make())
        return {"random": chance} if oracle is None else {"oracle": oracle, "random": chance}


def too_long(tasks: Sequence[object], played: Sequence[object]) -> str:
    """Return how many tasks were not played because of the time limit; empty if all were."""
    return f", {len(tasks) - len(played)} more would take too long" if len(played) < len(tasks) else ""


def function_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function part of a tool schema in OpenAI's format."""
    return schema["function"]


def thread_hint(text: str) -> str:
    """Return what to do if the text is SQLite's error about another thread; else nothing."""
    if "SQLite objects created in a thread" not in text:
        return ""
    return "; open the database in start() or reset(), or with sqlite3.connect(..., check_same_thread=False)"


def random_policy(env: Env) -> MessagePolicy:
    """Return a policy that calls random tools for some turns and then answers.

    Every second turn has a call with valid arguments that uses words of the conversation, so that tools are
    not only asked what they refuse; the other calls are at the edges of what the schemas allow.
    """

    def policy(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
        turns = sum(message["role"] == "assistant" for message in messages)
        schemas = list(env.tool_schemas)
        if not schemas or turns >= RANDOM_TURNS:
            choices = tuple(getattr(env.action_space, "choices", ())) or ("yes", "no", "42", "up", "left")
            return {"role": "assistant", "content": rng.choice(choices)}
        if turns % 2:
            function = function_of(rng.choice(schemas))
            said = "\n".join([*map(text_of, messages), *map(str, task.values())])[-2000:]
            return tool_call_message(function["name"], **arguments_for(function["parameters"], said, rng))
        return {"role": "assistant", "content": None, "tool_calls": [random_call(schemas, rng, turns)]}

    return policy
