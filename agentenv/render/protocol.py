"""The interface between the runner and a renderer, and the results that a renderer returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from agentenv.core.messages import CallStatus, JsonValue, Message, ToolCall

__all__ = ["Follower", "ParsedTurn", "RendererProtocol", "ReplyForm", "TemplateReport", "Verdict"]

Verdict: TypeAlias = Literal["fast", "history", "no_tool_role", "refused"]
"""How a template is rendered.

`fast`: only the new messages are rendered. `history`: the earlier messages are rendered with them.
`no_tool_role`: tools go through the text protocol. `refused`: the template cannot be rendered exactly.
"""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """The message and the tool calls that were read from the token ids of a completion."""

    message: Message
    """The assistant message. Thinking and calls are in keys of their own. Calls that cannot be read are in
    `content`, as they were written, because a call in `tool_calls` has a name and a JSON object."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Every call in order, each with its status."""

    @property
    def errors(self) -> tuple[str, ...]:
        """Texts that tell the model what is wrong with each malformed call."""
        no_error = (CallStatus.OK, CallStatus.IN_THINKING)
        return tuple(call.error for call in self.tool_calls if call.status not in no_error)


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """The findings of the template doctor."""

    verdict: Verdict
    reasons: tuple[str, ...] = ()
    remedy: str = ""
    warnings: tuple[str, ...] = ()
    grammar: str = "text"
    """Name of the tool-call grammar that completions are parsed with."""
    closers: Mapping[str, str] = field(default_factory=dict[str, str])
    """The control string that ends an assistant turn, by kind of turn: `text` or `call`."""
    prints_ids: bool = False
    """Whether the ids of calls stand in what the model reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyForm:
    """What a reply must be: calls of tools, or JSON."""

    calls: tuple[str, ...] = ()
    """Names of the tools that it may call; empty if it must not call any."""
    many: bool = True
    """Whether it may have several calls."""
    schema: Mapping[str, JsonValue] | None = None
    """JSON schema of a reply without calls; None if it must have calls."""


class Follower(Protocol):
    """Reads one completion while it is sampled."""

    @property
    def thinking(self) -> str:
        """Thinking that no further token can change; it only grows."""
        ...

    @property
    def content(self) -> str:
        """Text that no further token can change; it only grows."""
        ...

    def add(self, token_ids: Sequence[int]) -> None:
        """Read the next tokens of the completion."""
        ...


class RendererProtocol(Protocol):
    """The part of a renderer that the runner uses; each renderer is bound to the tools of one episode."""

    report: TemplateReport
    stop_token_ids: tuple[int, ...]

    @property
    def takes_images(self) -> bool:
        """Whether messages may have images."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id of the tokenizer."""
        ...

    def bind(self, tools: Sequence[Mapping[str, JsonValue]]) -> RendererProtocol:
        """Return a renderer for these tool schemas; this is cheap, because the diagnosis is shared."""
        ...

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Render the first prompt of an episode; nothing later in the episode is rendered in full.

        A last message of the assistant is the beginning of the reply, here and in `extend`.

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
            RenderError: The template cannot render these messages after the completion.
        """
        ...

    def parse(self, token_ids: Sequence[int]) -> ParsedTurn:
        """Parse a completion; text that the model wrote wrongly never raises an error."""
        ...

    def write(self, message: Message) -> list[int]:
        """Return the ids of a turn of the assistant as the model would sample it, with its stop token.

        Raises:
            RenderError: The template refuses the message, or what it writes reads back as another one.
        """
        ...

    def grammar(self, form: ReplyForm) -> str:
        """Return the grammar of replies that have a form; see `agentenv.engine.Sampling.grammar`.

        Raises:
            RenderError: No grammar is known for the way in which this model writes.
        """
        ...

    def follow(self, stop: Sequence[str] = ()) -> Follower:
        """Return what reads a completion while it is sampled; `stop` are texts that cut its content off."""
        ...

    def count(self, text: str) -> int:
        """Return how many tokens an untrusted text takes when it is rendered."""
        ...

    def trim(self, text: str, max_tokens: int) -> str:
        """Cut text to at most `max_tokens` tokens: its head and its tail with a marker between them."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode token ids to text that shows control tokens."""
        ...
