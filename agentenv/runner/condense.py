"""Condense a long conversation, so that it fits the model's context and can continue.

1. A condenser makes a shorter *view* of the messages. The record keeps every message unchanged. The
   episode continues in a new token sequence, and tokens carried over into it are not trained again.
2. The condensed text is kept in numbered blocks. The model can bring each block back once, with the tool
   `recall_block`. Everything else appears in the view byte for byte.
3. A message is replaced only if the replacement is shorter.
4. A condenser never sees a hint, which only a teacher is shown, so no block and no summary holds one. The
   model reads it further on in the message in which it stood, if the view has that message.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from agentenv.core.episode_env import derive_seed
from agentenv.core.errors import UsageError
from agentenv.core.messages import (
    ContentPart,
    JsonValue,
    Message,
    ToolCall,
    ToolErrorKind,
    ToolResult,
    text_of,
    without_hints,
)
from agentenv.engine.ask import TextModel
from agentenv.engine.interface import ChatEngine, Engine, Sampling

if TYPE_CHECKING:
    from agentenv.render.renderer import Renderer

__all__ = ["RECALL_TOOL", "Condenser", "DropToolOutputs", "Summarise", "View", "shortened", "with_recall"]

RECALL_TOOL: dict[str, JsonValue] = {
    "type": "function",
    "function": {
        "name": "recall_block",
        "description": "Bring back the full text of a condensed block by its number, once.",
        "parameters": {
            "type": "object",
            "properties": {"block": {"type": "integer", "description": "Number of the block."}},
            "required": ["block"],
            "additionalProperties": False,
        },
    },
}


def with_recall(tools: Sequence[Mapping[str, JsonValue]]) -> tuple[Mapping[str, JsonValue], ...]:
    """Return the tools of an episode whose conversation may be condensed.

    Raises:
        UsageError: The environment already has a tool named `recall_block`.
    """
    names = [cast("Mapping[str, object]", tool["function"])["name"] for tool in tools]
    if "recall_block" in names:
        raise UsageError(
            "the environment has a tool named recall_block, which a condenser adds itself",
            remedy="rename that tool, or play without a condenser",
        )
    return (*tools, RECALL_TOOL)


@dataclass(frozen=True, slots=True)
class View:
    """The messages with which the model continues after a condensation."""

    messages: tuple[Message, ...]
    cause: str
    """Why the conversation was condensed; the record's metrics count condensations by cause."""
    written: str = ""
    """Text that a summariser wrote into the view; its tokens become a span of kind `other`."""
    written_tokens: int = 0
    """Tokens that the summariser sampled; they count towards the episode's token limit."""


class Condenser:
    """Base class that decides when to condense and keeps the blocks. Subclasses write `shorten`.

    Args:
        at: the conversation is condensed when more than this share of the context is used.

    Raises:
        UsageError: `at` is not between 0 and 1.
    """

    opening: bool = False
    """Whether the first messages of an episode are condensed, too; otherwise they must fit as they are."""

    def __init__(self, *, at: float = 0.75) -> None:
        if not 0 < at <= 1:
            raise UsageError(f"at must be in (0, 1], not {at}")
        self.at = at
        self.blocks: list[str] = []
        """Full texts that were condensed in this episode; block `n` is `blocks[n - 1]`."""
        self._recalled: set[int] = set()

    def fresh(self) -> Condenser:
        """Return a copy for one episode, with no blocks; the original does not change."""
        condenser = copy.copy(self)
        vars(condenser).update(blocks=[], _recalled=set())
        return condenser

    def due(self, used_tokens: int, max_tokens: int | None) -> bool:
        """Return whether to condense now; always False if the context has no limit."""
        return max_tokens is not None and used_tokens > self.at * max_tokens

    async def shorten(self, messages: Sequence[Message]) -> View | None:
        """Return a shorter view of the messages before the newest observation, or None."""
        raise NotImplementedError(f"{type(self).__name__} must write shorten()")

    def keep(self, text: str) -> int:
        """Store a block and return its number, from 1."""
        self.blocks.append(text)
        return len(self.blocks)

    def recall(self, call: ToolCall) -> ToolResult:
        """Answer a call of `recall_block`; mistakes in the call are explained to the model."""
        number = call.values.get("block") if call.values is not None and len(call.values) == 1 else None
        if not isinstance(number, int) or isinstance(number, bool):
            why = "recall_block takes one argument, `block`, a whole number"
            return ToolResult(call.id, call.name, why, ToolErrorKind.BAD_ARGUMENTS)
        if not 1 <= number <= len(self.blocks):
            why = f"there is no block {number}"
            return ToolResult(call.id, call.name, why, ToolErrorKind.TOOL_ERROR)
        if number in self._recalled:
            why = f"block {number} was already brought back once"
            return ToolResult(call.id, call.name, why, ToolErrorKind.TOOL_ERROR)
        self._recalled.add(number)
        return ToolResult(call.id, call.name, self.blocks[number - 1])


async def shortened(condenser: Condenser, messages: Sequence[Message]) -> View | None:
    """Return a condenser's view of messages, with the hints that their first messages hold put back."""
    plain = [without_hints(message) for message in messages]
    view = await condenser.shorten(plain)
    if view is None:
        return None
    shown = list(view.messages)
    for index, (message, hinted) in enumerate(zip(plain, messages, strict=True)):
        if message is hinted or index >= len(shown) or shown[index]["role"] != message["role"]:
            continue
        if shown[index] is message:
            shown[index] = hinted
        elif len(shown) == len(messages):
            parts = cast("list[ContentPart]", hinted.get("content"))
            said: ContentPart = {"type": "text", "text": text_of(shown[index])}
            content = [said, *(part for part in parts if part.get("hint"))]
            shown[index] = {**shown[index], "content": content}
    return replace(view, messages=tuple(shown))


class DropToolOutputs(Condenser):
    """Replace the oldest tool outputs with short notes.

    Args:
        at: see `Condenser`.
        keep_last: number of newest tool outputs that are kept.
        min_chars: outputs shorter than this are kept. It must be at least 50, so that a note is never
            condensed again.
    """

    def __init__(self, *, at: float = 0.75, keep_last: int = 1, min_chars: int = 200) -> None:
        super().__init__(at=at)
        if keep_last < 0:
            raise UsageError(f"keep_last must be 0 or more, not {keep_last}")
        if min_chars < 50:
            raise UsageError(f"min_chars must be at least 50, not {min_chars}")
        self.keep_last = keep_last
        self.min_chars = min_chars

    async def shorten(self, messages: Sequence[Message]) -> View | None:
        """Condense every tool output except the newest ones."""
        outputs = [index for index, message in enumerate(messages) if message["role"] == "tool"]
        shortened = list(messages)
        for index in outputs[: max(len(outputs) - self.keep_last, 0)]:
            text = text_of(messages[index])
            if len(text) >= self.min_chars:
                note = f"[block {self.keep(text)}: {len(text)} characters condensed]"
                shortened[index] = {**messages[index], "content": note}
        return View(tuple(shortened), "tool_outputs") if shortened != list(messages) else None


class Summarise(Condenser):
    """Let a model summarise the middle of the conversation.

    The system message, the first user message and the newest messages are kept.

    Args:
        engine: model that writes the summary: a `ChatEngine`, an `Engine` with its `renderer`, or a
            `TextModel`.
        renderer: renderer of the engine, if the engine works on tokens.
        at: see `Condenser`.
        keep_last: number of newest messages that are kept. More are kept where a call and its results
            would be separated.
        instructions: instructions for the summariser.
        sampling: sampling settings for the summary; without a seed it derives from the text.
    """

    def __init__(
        self,
        engine: Engine | ChatEngine | TextModel,
        *,
        renderer: Renderer | None = None,
        at: float = 0.75,
        keep_last: int = 4,
        instructions: str = "Summarise this conversation. Keep every fact, number and decision.",
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__(at=at)
        if keep_last < 1:
            raise UsageError(f"keep_last must be at least 1, not {keep_last}")
        self._model = TextModel.of(engine, renderer, role="a summariser")
        self.keep_last = keep_last
        self._instructions = instructions
        self._sampling = sampling or Sampling(max_tokens=512)

    async def shorten(self, messages: Sequence[Message]) -> View | None:
        """Summarise the messages between the first user message and the newest ones."""
        users = (index for index, message in enumerate(messages) if message["role"] == "user")
        first = next(users, -1) + 1
        last = max(len(messages) - self.keep_last, first)
        # A tool result must not be separated from the call that it answers.
        while last > first and messages[last]["role"] == "tool":
            last -= 1
        middle = messages[first:last]
        if not middle:
            return None
        text = "\n\n".join(map(_told, middle))
        asked: Message = {"role": "user", "content": f"{self._instructions}\n\n{text}"}
        sampling = self._sampling
        if sampling.seed is None:
            # The same conversation gets the same summary, whichever episode finishes first.
            sampling = replace(sampling, seed=derive_seed("summary", text))
        answer = await self._model.ask([asked], sampling)
        summary = answer.text.strip()
        note = f"[block {len(self.blocks) + 1}: summary of {len(middle)} messages]\n{summary}"
        if len(note) >= len(text):
            return None
        self.keep(text)
        told: Message = {"role": "user", "content": note}
        return View(
            (*messages[:first], told, *messages[last:]), "summary", summary, answer.usage.completion_tokens
        )


def _told(message: Message) -> str:
    """Return one message as text, as the summariser and a recalled block show it."""
    calls = "".join(
        f"\n{call['function']['name']}({call['function']['arguments']})"
        for call in message.get("tool_calls", ())
    )
    return f"{message['role']}: {text_of(message)}{calls}"
