"""One episode's conversation with the model, as the episode loop sees it.

On tokens (`tokens`) or through an API that only speaks text (`text`); the loop knows
neither.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentenv.core.messages import JsonValue, Message, ToolCall
from agentenv.core.trajectory import Rewrite, TokenSequence
from agentenv.engine.base import ChatCompletion, Completion, Sampling
from agentenv.runner.condense import View
from agentenv.runner.conversation.fit import Observation

__all__ = ["Conversation", "Reply"]


@dataclass(frozen=True, slots=True)
class Reply:
    """One completion, read."""

    message: Message
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    num_tokens: int
    start: int = 0
    """First token of the completion in its sequence."""
    sequence: int = 0
    queue_s: float = 0.0


class Conversation(Protocol):
    """What the episode loop asks of a conversation."""

    untrainable_reason: str
    """Why nothing of this conversation may be trained on; empty if it may."""
    has_policy_tokens: bool
    """True once the policy itself sampled a token."""
    rewrites: list[Rewrite]
    """Where the conversation was condensed, and what was shown from there."""

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, JsonValue]]) -> None:
        """Begin with an episode's first messages."""
        ...

    @property
    def room(self) -> int | None:
        """Tokens left in the context; None without a limit."""
        ...

    def generate(
        self, sampling: Sampling, *, turn: int, deadline_s: float | None
    ) -> Awaitable[Completion | ChatCompletion]:
        """Return the engine's own awaitable, which gives what `read` takes."""
        ...

    def read(self, sampled: Completion | ChatCompletion, *, turn: int) -> Reply:
        """Record what this conversation's engine sampled, and read it."""
        ...

    def observe(self, reply: Reply, observation: Observation) -> Observation | None:
        """Answer a reply, cut to what fits; None if nothing fits."""
        ...

    @property
    def view(self) -> Sequence[Message]:
        """The messages that the model was shown, up to its last completion."""
        ...

    def used_with(self, observation: Observation) -> tuple[int, int | None]:
        """Tokens in use with an observation, about, and the context's limit."""
        ...

    def go_on_with(self, view: View) -> None:
        """Let the next observation follow a condensed view instead of what was shown."""
        ...

    @property
    def forks(self) -> Mapping[str, int]:
        """How often the history was rewritten, by cause."""
        ...

    @property
    def usage(self) -> Mapping[str, float]:
        """What an API reported over the episode: tokens by kind, and the cost; empty without an API."""
        ...

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """The tokens of the episode."""
        ...

    async def release(self) -> None:
        """Let the engine forget the episode."""
        ...
