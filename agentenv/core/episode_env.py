"""What passes between the runner and an environment, and the protocol that both keep.

`agentenv.envs.Env` implements the protocol for every environment; the runner needs nothing more
of it, and so never imports Gymnasium.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentenv.core.context import Context
from agentenv.core.messages import JsonValue, Message, ToolResult

__all__ = ["EpisodeEnv", "Outcome", "ResetResult", "StepResult"]


@dataclass(frozen=True, slots=True)
class ResetResult:
    """The first observation as chat messages, the system message included."""

    messages: tuple[Message, ...]
    info: Mapping[str, object] = field(default_factory=dict[str, object])
    repair_json: bool = False
    """Calls with broken JSON are mended where that is possible, and counted."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment answered to one message of the model."""

    messages: tuple[Message, ...] = ()
    """New messages besides the tool results (a user's text, say); no assistant messages."""
    tool_results: tuple[ToolResult, ...] = ()
    """One for each call in the action, in call order."""
    reward: float = 0.0
    """Of this turn alone; what `finish` gives is not in it."""
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The environment's verdict on a finished episode."""

    reward: float | None = 0.0
    """Added to the last turn's reward; None means that the episode cannot be scored."""
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    """Named parts of it."""


class EpisodeEnv(Protocol):
    """One environment instance as the runner drives it; plays one episode at a time."""

    ends_on_text: bool
    """True if a message without tool calls is the final answer."""

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, JsonValue]]:
        """Schemas shown to the model, in OpenAI's shape; may depend on the task after `begin`."""
        ...

    async def begin(self, task: Mapping[str, object], *, seed: int, context: Context) -> ResetResult:
        """Start an episode on a task."""
        ...

    async def advance(self, action: Message) -> StepResult:
        """Answer one assistant message; its tool calls are run at once and answered in order."""
        ...

    async def is_finished(self) -> bool:
        """Ask the environment's optional `is_done()`."""
        ...

    async def end(self, stop_reason: str) -> Outcome:
        """Score the episode. The author's `finish` runs exactly once however often this is called."""
        ...

    async def shutdown(self) -> None:
        """Close the environment; may be called twice, and without `begin`."""
        ...
