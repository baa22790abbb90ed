"""The context of one episode, which the runner passes to the environment and its tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentenv.core.errors import EnvironmentMisuse
from agentenv.core.execution import SandboxProtocol
from agentenv.core.limits import RunLimits
from agentenv.core.messages import Message

__all__ = ["Context", "EpisodeRecord", "check_attempt"]


class EpisodeRecord(Protocol):
    """The part of an episode's record that rewards read; `Trajectory` implements it."""

    @property
    def messages(self) -> Sequence[Message]:
        """All messages of the episode, as they were shown to the model."""
        ...

    @property
    def answer(self) -> str:
        """Text of the last assistant message."""
        ...


@dataclass(slots=True)
class Context:
    """Seed, task, limits and sandbox of one episode; the runner creates it and passes it at reset.

    A tool that declares a parameter of this type receives it. The model never sees it.
    """

    episode_id: str = "episode"
    seed: int = 0
    """Seed of the episode, computed from run seed, task and member, never from the order of episodes."""
    task: Mapping[str, object] = field(default_factory=dict[str, object])
    limits: RunLimits = field(default_factory=RunLimits)
    sandbox: SandboxProtocol | None = None
    """Sandbox for untrusted code; None if the environment does not need one."""
    deadline: float | None = None
    """`time.monotonic()` value at which the episode ends."""
    turn: int = 0
    """Index of the assistant turn being answered."""
    attempt: int = 0
    """Index of the model's attempt at the task. An environment that lets the model try again sets it when it
    answers the turn that ends an attempt; each later turn is recorded with it (`Turn.attempt`)."""
    tool_calls_left: int | None = None
    """Number of tool calls that the episode may still run, including those of this turn; None means no
    limit. The runner keeps the count and answers the calls over the limit; tools may read it."""
    state: dict[str, object] = field(default_factory=dict[str, object])
    """A dictionary that the environment's tools may use freely; each episode starts with an empty one."""
    draft: Callable[[], EpisodeRecord] | None = None
    """Function that returns the record so far, without reward fields; the runner sets it before it ends
    the episode.

    A reward with a parameter `trajectory` receives this record. `answer` and `messages` are read from it
    too, so that rewards judge what the model was shown, not what the environment returned.
    """


def check_attempt(attempt: object) -> None:
    """Check the index of an attempt, which an environment has set.

    Raises:
        EnvironmentMisuse: The index is no number from 0.
    """
    if not isinstance(attempt, int) or attempt < 0:
        raise EnvironmentMisuse(
            f"the environment set context.attempt to {attempt!r}", remedy="count attempts from 0"
        )
