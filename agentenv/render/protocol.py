"""What a renderer returns, and the form that a reply must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from agentenv.core.messages import CallStatus, JsonValue, Message, ToolCall

__all__ = ["ParsedTurn", "ReplyForm", "TemplateReport", "Verdict"]

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
