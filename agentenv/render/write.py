"""Write a turn of the assistant as the model would have sampled it, for turns that no model samples.

The template renders the real message, and what stands between the generation prompt and the end of the turn
is the turn. Where the prompt opens the thinking, the turn closes it. What was written is read back, and a
turn that reads back as another message is refused.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from agentenv.core.errors import RenderError
from agentenv.core.messages import Message, text_of
from agentenv.render.control import SENTINEL
from agentenv.render.parse.turn import THINK_TAGS
from agentenv.render.protocol import ParsedTurn
from agentenv.render.tail import FIRST, USER, Cut, Plain, TailReader, TurnEnd

__all__ = ["TurnWriter", "refuse_other"]

_THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message in which templates look for its thinking."""


@dataclass(frozen=True, slots=True)
class TurnWriter:
    """Writes the turns of one kind for one template."""

    reader: TailReader
    end: TurnEnd
    thinking_open: str
    """The thinking tag that the generation prompt opens; empty if it opens none."""

    def write(self, message: Plain, tools: Sequence[Mapping[str, object]]) -> Cut:
        """Return the turn with its closer, and the control string at the end of the generation prompt.

        Raises:
            RenderError: The template refuses the message, or leaves out its thinking.
        """
        prompt = self.reader.render([USER], tools=tools)
        last = next((string for _, string in self.reader.control.positions(prompt)[-1:]), "")
        turn = self._turn(prompt, message, tools)
        said = str(message.get("content") or "").strip()
        dropped = said not in turn or not _holds_calls(turn, message)
        if said and message.get("tool_calls") and dropped and not self.thinking_open:
            # The template writes text or calls; where a turn begins with its text, calls may follow it.
            empty = None if self.reader.habits.null_content else ""
            if self._turn(prompt, {"role": "assistant", "content": said}, tools).startswith(said):
                turn = f"{said}\n{self._turn(prompt, {**message, 'content': empty}, tools)}"
        return Cut(last if last and prompt.endswith(last) else "", self._closed(turn))

    def _turn(self, prompt: str, message: Plain, tools: Sequence[Mapping[str, object]]) -> str:
        """Return what the template writes after the prompt for a message."""
        message = dict(message)
        thinking = str(message.pop("reasoning_content", None) or "")
        closes = dict(THINK_TAGS).get(self.thinking_open)
        failed: RenderError | None = None
        for form in self._forms(message, thinking=bool(thinking)):
            try:
                whole = self.reader.render([USER, form], tools=tools, generation_prompt=False)
            except RenderError as error:
                failed = failed or error
                continue
            begun, follows = _begun(prompt, whole)
            turn = whole[begun:]
            right = form is message or (turn.count(SENTINEL) == 1 and _holds_calls(turn, message))
            if right and (closes is None or (follows and closes in turn)):
                return turn.replace(SENTINEL, thinking)
        if failed or thinking or closes is None:
            raise failed or RenderError("the template has no place for the thinking of this turn")
        # DeepSeek's templates leave out thinking that is over, so the turn closes what the prompt opened.
        whole = self.reader.render([USER, message], tools=tools, generation_prompt=False)
        return f"\n{closes}\n\n{whole[_begun(prompt, whole)[0] :]}"

    def _forms(self, message: Plain, *, thinking: bool) -> Iterator[Plain]:
        """Yield the message in each form in which templates take thinking, with the sentinel in its place."""
        if not thinking:
            yield message
        if thinking or self.thinking_open:
            yield from ({**message, key: SENTINEL} for key in _THINKING_KEYS)
            for opens, closes in THINK_TAGS:
                if self.thinking_open in {"", opens}:
                    content = f"{opens}\n{SENTINEL}\n{closes}\n\n{message.get('content') or ''}"
                    yield {**message, "content": content}

    def _closed(self, turn: str) -> str:
        """Return the turn up to its closer, which is added if the template leaves it to the next turn."""
        stops = {*self.reader.stop_strings, self.end.end}
        ends = [(at, string) for at, string in self.reader.control.positions(turn) if string in stops]
        if not ends:
            return turn + self.end.end
        position, string = ends.pop()
        # Phi-3 ends a conversation with another stop token behind that of its last turn.
        while ends and not turn[ends[-1][0] + len(ends[-1][1]) : position].strip():
            position, string = ends.pop()
        return turn[: position + len(string)]


def _begun(prompt: str, whole: str) -> tuple[int, bool]:
    """Return where the turn begins in a render of it, and whether it follows the whole generation prompt.

    White space may differ. Where the prompt's end was rewritten, the turn begins where a tag may begin.
    """
    ours, begun = prompt.find(FIRST) + len(FIRST), whole.find(FIRST) + len(FIRST)
    first = begun
    while ours < len(prompt) and begun < len(whole):
        same = prompt[ours] == whole[begun]
        if not same and not prompt[ours].isspace() and not whole[begun].isspace():
            break
        begun += same or not prompt[ours].isspace()
        ours += same or prompt[ours].isspace()
    if not prompt[ours:].strip():
        return begun, True
    return max(first, *(whole.rfind(mark, 0, begun) + 1 for mark in ("\n", ">", "]"))), False


def _holds_calls(turn: str, message: Plain) -> bool:
    calls = cast("list[dict[str, dict[str, str]]]", message.get("tool_calls") or [])
    return all(call["function"]["name"] in turn for call in calls)


def refuse_other(asked: Message, read: ParsedTurn) -> None:
    """Refuse a turn that was read back as another message than the one that was to be written.

    Raises:
        RenderError: The messages differ in their text, their thinking or their calls, or a call is malformed.
    """
    wanted, found = _said(asked), _said(read.message)
    for part, value in wanted.items():
        if found[part] != value and _normal(found[part]) != _normal(value):
            raise RenderError(
                f"the template does not write this turn so that it can be read back: its {part} "
                f"{_short(value)} was read as {_short(found[part])}",
                remedy="write what the template has a place for: one call, or text without tags of calls",
            )
    if read.errors:
        raise RenderError(
            f"the template writes this turn so that it is malformed: {read.errors[0]}",
            remedy="return calls in tool_calls, and not in the text",
        )


def _said(message: Message) -> dict[str, object]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {
        "calls": [(call["name"], _values(call["arguments"])) for call in calls],
        "thinking": str(message.get("reasoning_content") or "").strip(),
        "content": text_of(message).strip(),
    }


def _values(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _normal(value: object) -> str:
    """Return a value as text in the normal form into which some tokenizers turn all they encode."""
    return unicodedata.normalize("NFC", json.dumps(value, ensure_ascii=False, sort_keys=True))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
