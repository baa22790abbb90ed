"""What the runner hands to an environment and its tools for one episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentenv.core.execution import SandboxProtocol
from agentenv.core.limits import RunLimits
from agentenv.core.messages import Message

__all__ = ["Context", "EpisodeRecord"]


class EpisodeRecord(Protocol):
    """What a reward reads of an episode's record; a `Trajectory` is one."""

    @property
    def messages(self) -> Sequence[Message]:
        """Everything said, as the model was shown it."""
        ...

    @property
    def answer(self) -> str:
        """Text of the last assistant message."""
        ...


@dataclass(slots=True)
class Context:
    """One episode's surroundings, filled by the runner and handed over at reset.

    A tool that declares a parameter of this type gets it; the model never sees it.
    """

    episode_id: str = "episode"
    seed: int = 0
    """Seed of the episode: from run seed, task and member, never from order."""
    task: Mapping[str, object] = field(default_factory=dict[str, object])
    limits: RunLimits = field(default_factory=RunLimits)
    sandbox: SandboxProtocol | None = None
    """Where untrusted code runs, when the environment asks for one."""
    deadline: float | None = None
    """`time.monotonic()` value at which the episode ends."""
    turn: int = 0
    """Index of the assistant turn being answered."""
    tool_calls_left: int | None = None
    """Tool calls that the episode may still run, those of this turn included; None without a limit.
    The runner counts them and answers the calls over the limit itself; here they can be read."""
    state: dict[str, object] = field(default_factory=dict[str, object])
    """Free for the environment's tools; new for each episode."""
    draft: Callable[[], EpisodeRecord] | None = None
    """Set by the runner before it ends the episode: the record so far, without reward fields.

    A reward that asks for `trajectory` gets it, and `answer` and `messages` are read from it, so
    that rewards judge what the model was shown rather than what the environment handed out.
    """
