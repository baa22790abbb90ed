"""What the runner asks of a renderer: messages to tokens by appending, tokens to a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from agentenv.core.messages import CallStatus, JsonValue, Message, ToolCall

__all__ = ["ParsedTurn", "RendererProtocol", "TemplateReport", "Verdict"]

Verdict: TypeAlias = Literal["fast", "history", "no_tool_role", "refused"]
"""How a template is rendered: from what is new; with the history; by the text protocol; not at all."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A completion, read from its token ids."""

    message: Message
    """Role assistant; `content` without calls and thinking, which stand in their own keys."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Every call in order, each with its status; those with status ok are in `message`."""

    @property
    def errors(self) -> tuple[str, ...]:
        """For the model: what is wrong with each malformed call."""
        wrong = (CallStatus.OK, CallStatus.IN_THINKING)
        return tuple(call.error for call in self.tool_calls if call.status not in wrong)


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What the template doctor found."""

    verdict: Verdict
    reasons: tuple[str, ...] = ()
    remedy: str = ""
    warnings: tuple[str, ...] = ()
    grammar: str = "text"
    """Name of the tool-call grammar that completions are parsed with."""
    closers: Mapping[str, str] = field(default_factory=dict[str, str])
    """What ends an assistant turn, by kind: `text`, `call`."""


class RendererProtocol(Protocol):
    """The part of a renderer that the runner uses; bound to one episode's tools."""

    report: TemplateReport
    stop_token_ids: tuple[int, ...]

    def bind(self, tools: Sequence[Mapping[str, JsonValue]]) -> RendererProtocol:
        """Return a renderer for these tool schemas; cheap, the doctor's work is shared."""
        ...

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Render an episode's first prompt: the only full render of an episode.

        Raises:
            RenderError: The template refuses these messages.
        """
        ...

    def extend(
        self,
        sampled_ids: Sequence[int],
        tool_calls: Sequence[ToolCall],
        new_messages: Sequence[Message],
        history: Sequence[Message] | None = None,
    ) -> list[int]:
        """Return the ids to append after the sampled ones, up to the next generation prompt.

        Raises:
            RenderError: The template cannot say how the conversation goes on.
        """
        ...

    def parse(self, token_ids: Sequence[int]) -> ParsedTurn:
        """Read a completion; never raises for what the model wrote."""
        ...

    def count(self, text: str) -> int:
        """Tokens of untrusted text, as it would be rendered."""
        ...

    def trim(self, text: str, max_tokens: int) -> str:
        """Return text of at most `max_tokens` tokens: head and tail around a marker."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, control tokens visible."""
        ...
