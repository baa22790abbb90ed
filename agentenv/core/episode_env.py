"""What passes between the runner and an environment, and the protocol that both keep.

`agentenv.envs.Env` implements the protocol for every environment; the runner needs nothing more
of it, and so never imports Gymnasium.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Protocol, Self, cast

from agentenv.core.context import Context
from agentenv.core.errors import EnvironmentMisuse
from agentenv.core.messages import JsonValue, Message, ToolCall, ToolResult

__all__ = ["Action", "EpisodeEnv", "Outcome", "ResetResult", "StepResult", "check_step"]


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the model as an environment gets it: what was said, and the calls to run."""

    message: Message
    """The assistant message as it is recorded; calls that are not to be run stand in it too."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls to run, parsed, in call order."""

    @classmethod
    def of(cls, action: object) -> Self:
        """Read an action that was given as text or as an assistant message.

        Raises:
            EnvironmentMisuse: It is neither.
        """
        if isinstance(action, str):
            return cls({"role": "assistant", "content": action})
        if not isinstance(action, Mapping) or cast("Message", action).get("role") != "assistant":
            raise EnvironmentMisuse(f"an action is text or an assistant message, not {action!r:.200}")
        message = cast("Message", action)
        return cls(message, tuple(ToolCall.from_message(call) for call in message.get("tool_calls") or ()))

    def to_message(self) -> Message:
        """Return the message with the calls to run and no others."""
        fields = {key: value for key, value in self.message.items() if key != "tool_calls"}
        if self.tool_calls:
            fields["tool_calls"] = [call.to_message() for call in self.tool_calls]
        return cast("Message", fields)


@dataclass(frozen=True, slots=True)
class ResetResult:
    """The first observation as chat messages, the system message included."""

    messages: tuple[Message, ...]
    info: Mapping[str, object] = field(default_factory=dict[str, object])
    repair_json: bool = False
    """Calls with broken JSON are mended where that is possible, and counted."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment answered to one action of the model."""

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

    async def advance(self, action: Action) -> StepResult:
        """Answer one action; its tool calls are run at once and answered in order."""
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


def check_step(step: StepResult, calls: Sequence[ToolCall]) -> None:
    """Check what an environment answered.

    Raises:
        EnvironmentMisuse: Calls without a result, or a reward that is no number.
    """
    answered = [result.tool_call_id for result in step.tool_results]
    if answered != [call.id for call in calls]:
        raise EnvironmentMisuse(
            f"the environment answered the calls {answered} where {[call.id for call in calls]} were made; "
            "give one result for each call, in call order"
        )
    if not isfinite(step.reward):
        raise EnvironmentMisuse(f"step gave the reward {step.reward!r}; it must be finite")
