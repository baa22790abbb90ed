"""What an agent asks for, and what it gets, without the form of a wire format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from agentenv.core.errors import AgentEnvError
from agentenv.core.messages import JsonValue, Message
from agentenv.engine.interface import FinishReason
from agentenv.render.protocol import ReplyForm

__all__ = ["Answer", "Asked", "NotAnswered", "Progress"]


class NotAnswered(AgentEnvError):
    """A request of an agent is not answered by the model.

    Args:
        status: the HTTP status of the answer.
        code: short name of the reason, which SDKs pass on to the agent.
        args: the message.
        retry: whether the client should ask again.
    """

    def __init__(self, status: int, code: str, *args: object, retry: bool = False) -> None:
        super().__init__(*args)
        self.status = status
        self.code = code
        self.retry = retry

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild the error with all of its fields, which `args` does not have."""
        return (type(self), (self.status, self.code, *self.args), {"retry": self.retry, "remedy": ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request of an agent."""

    messages: list[Message]
    """The whole conversation."""
    tools: list[Mapping[str, JsonValue]] = field(default_factory=list[Mapping[str, JsonValue]])
    """Schemas of the tools in OpenAI's format."""
    tool_choice: Literal["auto", "none"] = "auto"
    """Whether the model may call tools, which it is shown in any case so that prompts stay the same."""
    form: ReplyForm | None = None
    """What the reply must be; None if it may be anything."""
    parallel_calls: bool = True
    """Whether a reply may have several calls."""
    model: str = ""
    """Name of the model as the client wrote it, which is sent back."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    """Requests of an episode that are equal and have the same seed get the same reply."""
    ignored: tuple[str, ...] = ()
    """Names of settings that the client sent and that the run's own settings replace."""
    stream: bool = False
    """True if the client wants the answer in parts."""
    digest: bytes = b""
    """Digest of the body; equal requests have equal digests."""
    retry: bool = False
    """True if the client says that it sent this request before."""
    call_prefix: str = "call_"
    """What the ids of calls begin with in the client's API."""
    size: int = 0
    """Bytes of the body."""


Kind: TypeAlias = Literal["thinking", "text"]
"""What a part of an answer belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What is certain of an answer that is still being sampled."""

    thinking: str = ""
    """Beginning of the thinking."""
    text: str = ""
    """Beginning of the text."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Number of tokens of the prompt that were sent before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The model's reply to a request."""

    message: Message
    """The assistant message, with call ids that are unique in the session."""
    finish_reason: FinishReason
    stop: str | None = None
    """The stop string that ended the reply; None if none did."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Number of tokens of the prompt that were sent before."""
    number: int = 0
    """Number of the reply in the session."""

    @property
    def text(self) -> str:
        """Text of the reply."""
        content = self.message.get("content")
        return content if isinstance(content, str) else ""

    @property
    def thinking(self) -> str:
        """Thinking of the reply; empty if there is none."""
        return self.message.get("reasoning_content") or ""

    @property
    def parts(self) -> Iterator[tuple[Kind, str]]:
        """Thinking and text, as far as there are any; an answer without anything has an empty text."""
        if self.thinking:
            yield "thinking", self.thinking
        if self.text or not self.calls:  # clients read the first part without looking whether there is one
            yield "text", self.text

    @property
    def calls(self) -> Sequence[tuple[str, str, str]]:
        """Id, name and arguments of each call."""
        calls = self.message.get("tool_calls") or ()
        return [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
