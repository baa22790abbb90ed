"""The conversation of one episode with the model, as the episode loop sees it.

There are two implementations: `tokens` works on token ids, and `text` uses a chat API that returns only
text. The episode loop does not know which one it plays on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from agentenv.core.messages import JsonValue, Message, ToolCall
from agentenv.core.trajectory import Rewrite, TokenSequence
from agentenv.engine.interface import ChatCompletion, Completion, Sampling
from agentenv.runner.conversation.fit import TurnAnswer

if TYPE_CHECKING:
    from agentenv.runner.condense import View

__all__ = ["Conversation", "Recorded", "Reply"]


@dataclass(frozen=True, slots=True)
class Reply:
    """One completion of the model after parsing."""

    message: Message
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    num_tokens: int
    start: int = 0
    """Index of the completion's first token in its sequence."""
    sequence: int = 0
    """Index of the sequence that holds the completion."""
    queue_s: float = 0.0
    """Seconds that the request waited before the engine began to generate."""


class Recorded(Protocol):
    """What the record of an episode reads from its conversation."""

    untrainable_reason: str
    """Why this conversation must not be trained on; empty if it may be."""
    has_policy_tokens: bool
    """True once the policy has sampled a token."""
    rewrites: list[Rewrite]
    """Turns before which the conversation was condensed, and the messages shown from then on."""

    @property
    def forks(self) -> Mapping[str, int]:
        """How often the history was rewritten, by cause."""
        ...

    @property
    def usage(self) -> Mapping[str, float]:
        """Totals that a chat API reported for the episode (tokens by kind, and the cost); else empty."""
        ...

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """Token sequences of the episode."""
        ...

    async def release(self) -> None:
        """Let the engine forget the episode."""
        ...


class Conversation(Recorded, Protocol):
    """Methods that the episode loop calls on a conversation."""

    takes_images: bool
    """Whether messages may contain images."""

    def start(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, JsonValue]]
    ) -> Sequence[Message]:
        """Start the conversation with an episode's first messages; return them as the model is shown them."""
        ...

    def begin_with(self, view: View) -> None:
        """Show a condensed view in place of the first messages; called before the first completion."""
        ...

    @property
    def room(self) -> int | None:
        """Tokens left in the context; None if the context has no limit."""
        ...

    def generate(
        self, sampling: Sampling, *, turn: int, deadline_s: float | None
    ) -> Awaitable[Completion | ChatCompletion]:
        """Return the engine's awaitable; pass its result to `read`."""
        ...

    def read(self, sampled: Completion | ChatCompletion, *, turn: int) -> Reply:
        """Record a completion of this conversation's engine and parse it."""
        ...

    def observe(self, reply: Reply, answer: TurnAnswer) -> TurnAnswer | None:
        """Append the answer to a reply, cut to the room that is left; return None if nothing fits."""
        ...

    @property
    def view(self) -> Sequence[Message]:
        """The messages that the model was shown, up to its last completion."""
        ...

    def used_with(self, answer: TurnAnswer) -> tuple[int, int | None]:
        """Return about how many tokens are used with an answer appended, and the context's limit."""
        ...

    def go_on_with(self, view: View) -> None:
        """Append the next answer to a condensed view instead of the messages shown so far."""
        ...
