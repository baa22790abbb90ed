"""The input of every check (`Subject`), and the exceptions with which a check ends."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentenv.core.errors import AgentEnvError
from agentenv.core.limits import RunLimits
from agentenv.core.messages import Message
from agentenv.core.seeds import derive_seed
from agentenv.core.task import Task
from agentenv.envs.env import Env
from agentenv.envs.spec import EnvSpec
from agentenv.runner.options import RunnerOptions
from agentenv.testing.episodes import MessagePolicy, Played, oracle_of, play
from agentenv.testing.fuzz import random_call

__all__ = ["CHECK_LIMITS", "Problem", "Skipped", "Subject", "function_of", "random_policy"]


CHECK_LIMITS = {"max_turns": 4, "max_tokens_per_turn": 64, "max_context_tokens": 65_536}
"""Limits of the episodes that the runner plays, if the caller sets none."""


class Problem(Exception):
    """Something is wrong with the environment."""


class Skipped(Exception):
    """The check does not apply to the environment."""


@dataclass
class Subject:
    """The environment being checked, the options of the checks, and the episodes played so far."""

    entry: EnvSpec
    tasks: int
    fuzz_calls: int
    seed: int
    trivial_limit: float
    runner: RunnerOptions
    """Options of the runner that plays episodes of the environment."""
    limits: RunLimits
    """Limits of the episodes that the runner plays."""
    plays: list[Played] = field(default_factory=list[Played])

    def some_tasks(self) -> list[Task]:
        """Return the tasks to play."""
        tasks = self.entry.task_set().take(self.tasks)
        if not tasks:
            raise Problem("the environment has no tasks")
        return tasks

    def seed_of(self, task: Task) -> int:
        """Return the seed of a task's episode."""
        return derive_seed(self.seed, task.id)

    async def play(self, policy: MessagePolicy, task: Task) -> Played:
        """Play a task; the message of an exception names the task."""
        try:
            played = await play(self.entry, policy, task, seed=self.seed_of(task))
        except AgentEnvError as error:
            raise Problem(f"task {task.id}: {error}") from error
        except Exception as error:
            error.args = (f"task {task.id}: {error}",)
            raise
        self.plays.append(played)
        return played

    def policy(self) -> MessagePolicy:
        """Return the oracle; without one, a policy that calls random tools and then answers."""
        return oracle_of(self.entry) or random_policy(self.entry.make())


def function_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function part of a tool schema in OpenAI's format."""
    return schema["function"]


def random_policy(env: Env) -> MessagePolicy:
    """Return a policy that calls random tools for three turns and then answers."""

    def policy(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
        turns = sum(message["role"] == "assistant" for message in messages)
        schemas = list(env.tool_schemas)
        if not schemas or turns >= 3:
            return {"role": "assistant", "content": rng.choice(["yes", "no", "42", "up", "left"])}
        return {"role": "assistant", "content": None, "tool_calls": [random_call(schemas, rng, turns)]}  # pyright: ignore[reportReturnType]

    return policy
