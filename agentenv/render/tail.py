"""Find the text that a template writes after an assistant turn, by means of a sentinel.

A small conversation is rendered in which the sentinel stands for the content of the assistant turn.
The text after the sentinel, up to the next generation prompt, is what follows any assistant turn.
The history is not rendered: the template may rewrite it, and the cost depends on the new messages
only. How an assistant turn ends is learnt once for each kind of turn: `text`, and `call` (the turn
has tool calls, and their results follow).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from agentenv.core.errors import RenderError
from agentenv.render.control import SENTINEL, ControlSet
from agentenv.render.parse.library import GRAMMARS
from agentenv.render.template import ChatTemplate

__all__ = ["FIRST", "PROBE", "PROBE_TOOL", "USER", "Cut", "Habits", "Kind", "Plain", "TailReader", "TurnEnd"]

Kind: TypeAlias = Literal["text", "call"]
Plain: TypeAlias = dict[str, object]
"""A message in the form that a template reads."""

PROBE = "PROBEk8Jx2Qm5W"
"""Unique text that stands for the content of a new message while a template is examined."""

PROBE_TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name."},
                "n": {"type": "integer", "description": "Days."},
            },
            "required": ["city", "n"],
        },
    },
}
FIRST = "FIRSTh6Rw2Nc8"
"""Unique text of the user's message before an assistant turn; it must never reach a prompt."""
USER: Plain = {"role": "user", "content": FIRST}


@dataclass(frozen=True, slots=True)
class Habits:
    """The form of messages that a template was found to need."""

    json_arguments: bool = False
    """Call arguments must be JSON text and not objects."""
    content_parts: bool = False
    """Content must be a list of parts and not text."""
    tools_needed: bool = False
    """The template cannot be rendered without tools."""
    empty_tools: bool = False
    """The template must get an empty list if there are no tools."""
    one_call: bool = False
    """The template refuses more than one call in a turn."""
    two_calls: bool = False
    """The template ends a turn only after two calls, so a single call is rendered twice."""
    nine_ids: bool = False
    """Call ids must be nine letters and digits."""
    null_content: bool = False
    """The content of a turn with calls must be None."""
    spelled: str = ""
    """The grammar in which calls are written as content, for a template that leaves calls out."""
    system_role: bool = True
    """The template can render a system message."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How an assistant turn of one kind ends."""

    end: str
    """The control string that ends the turn."""
    closer: str | None
    """The same string if the template writes it as part of the turn; None if it opens the next turn."""
    known_stop: bool = True
    """True if generation already stops at the end of the turn; if False, `end` must become a stop token."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The text to append, and the control string before it (empty if any may stand there)."""

    after: str
    text: str


class TailReader:
    """Renders with a template, in the form that its habits ask for, and returns the tail."""

    __slots__ = ("control", "habits", "stop_strings", "template")

    def __init__(
        self, template: ChatTemplate, control: ControlSet, stop_strings: frozenset[str], habits: Habits
    ) -> None:
        self.template = template
        self.control = control
        self.stop_strings = stop_strings
        self.habits = habits

    @property
    def tools_needed(self) -> Sequence[Mapping[str, object]] | None:
        """The tools of a probe that needs none; None if the template can be rendered without tools."""
        return [PROBE_TOOL] if self.habits.tools_needed else None

    def render(
        self,
        messages: Sequence[Plain],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        generation_prompt: bool = True,
    ) -> str:
        """Render messages in the form that the template needs."""
        if self.habits.spelled:
            messages = [_spelled(message, self.habits.spelled) for message in messages]
        if self.habits.content_parts:
            messages = [_as_parts(message) for message in messages]
        tools = list(tools) if tools else [] if self.habits.empty_tools else None
        return self.template.render(messages, tools=tools, generation_prompt=generation_prompt)

    def tail(
        self,
        calls: Sequence[Plain],
        new: Sequence[Plain],
        *,
        before: Sequence[Plain] = (USER,),
        tools: Sequence[Mapping[str, object]] | None = None,
        generation_prompt: bool = True,
    ) -> str:
        """Return the text after an assistant turn.

        Args:
            calls: the calls of the turn as `{"id", "name"}`; empty for a text turn.
            new: the messages that follow the turn.
            before: the conversation before the turn.
            tools: tool schemas, if the template needs them or the earlier messages matter.
            generation_prompt: whether to open the next assistant turn.

        Raises:
            RenderError: The template refuses the turn or leaves it out.
        """
        turn = self.assistant(calls)
        text = self.render([*before, turn, *new], tools=tools, generation_prompt=generation_prompt)
        # Each call of the turn holds a sentinel, so the tail begins after the last one.
        position = text.rfind(SENTINEL)
        if position < 0:
            what = "an assistant turn's tool calls" if calls else "an assistant turn's text"
            raise RenderError(f"the template leaves out {what}")
        return text[position + len(SENTINEL) :]

    def assistant(self, calls: Sequence[Plain]) -> Plain:
        """Return an assistant turn that has the sentinel in place of the model's own text."""
        if not calls:
            return {"role": "assistant", "content": SENTINEL}
        if self.habits.one_call:
            calls = calls[-1:]
        if self.habits.two_calls and len(calls) == 1:
            calls = [*calls, *calls]
        arguments: object = f'{{"x": "{SENTINEL}"}}' if self.habits.json_arguments else {"x": SENTINEL}
        entries = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": arguments}}
            for call in calls
        ]
        content = None if self.habits.null_content else ""
        return {"role": "assistant", "content": content, "tool_calls": entries}

    def learn(
        self,
        kind: Kind,
        ends: Mapping[Kind, TurnEnd],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> TurnEnd:
        """Find out how a turn of this kind ends; `ends` holds the ends of the other kinds.

        Raises:
            RenderError: The template has no such turn, or no control token ends it.
        """
        calls: list[Plain] = [] if kind == "text" else [probe_call()]
        new = [probe_message(kind)]
        written = self.tail(calls, new, tools=tools)
        if PROBE not in written:
            raise RenderError("the template leaves out " + ("tool results" if calls else "user messages"))
        written = written[: written.index(PROBE)]
        try:
            last = self.tail(calls, [], tools=tools, generation_prompt=False)
        except RenderError:
            last = ""  # some templates refuse a conversation that ends with an assistant turn
        end = self._candidate(kind, written, last, ends)
        between = written[: written.index(end)]
        words = self._plain_text(between).strip()
        if kind == "text" and end not in self.stop_strings and words and not self._frames(between, end, last):
            raise RenderError(
                f"the template writes the plain text {between.strip()!r} between the assistant's text and "
                f"{end!r}",
                remedy=f"if {end!r} does not end a turn, pass the model's stop tokens as stop_token_ids; if "
                "the text is a control token, register it in the tokenizer as a special token",
            )
        stops_in_last = any(string in self.stop_strings for _, string in self.control.positions(last))
        closes = any(string == end for _, string in self.control.positions(last))
        known_stop = stops_in_last or end in self.stop_strings
        return TurnEnd(end, end if closes or stops_in_last else None, known_stop)

    def cut(self, turn_end: TurnEnd, tail: str, last: str) -> Cut:
        """Return what to append after a turn whose last sampled token is the string `last`.

        Raises:
            RenderError: The tail does not contain the end of the turn.
        """
        # A turn that the model ended is not ended again; a turn that was cut off gets the template's end.
        if turn_end.closer is not None:
            for position, string in self.control.positions(tail):
                if string == turn_end.closer:
                    if last and (last in self.stop_strings or last == turn_end.closer):
                        return Cut(string, tail[position + len(string) :])
                    return Cut("", tail[position:])
        else:
            for position, string in self.control.positions(tail):
                if string in self.stop_strings or string == turn_end.end:
                    if last == string:
                        return Cut(string, tail[position + len(string) :])
                    return Cut("", tail[position:])
        raise RenderError(
            f"in this conversation the template does not write {turn_end.end!r}, which ends an assistant turn"
        )

    def _candidate(self, kind: Kind, written: str, last: str, ends: Mapping[Kind, TurnEnd]) -> str:
        in_written = [string for _, string in self.control.positions(written)]
        in_last = [string for _, string in self.control.positions(last)]
        stops_written = [string for string in in_written if string in self.stop_strings]
        # The checks go from the strongest evidence to the weakest: first a stop token that is written whether
        # or not another turn follows, then a stop token after the turn, then strings that are no known stops.
        for string in in_last:
            if string in self.stop_strings and string in in_written:
                return string
        if stops_written and (kind == "call" or not last.strip()):
            return stops_written[0]
        if kind == "text":
            if closing := self._at_end(last, in_written):
                return closing
            if in_written:
                return in_written[0]
        else:
            known = {end.end for end in ends.values()}
            for string in in_written:
                if string in known:
                    return string
            if guess := self._unknown_closer(in_written, last, ends):
                return guess
            if in_written and "text" in ends:
                raise RenderError(
                    f"the template does not end a turn with tool calls: {in_written[0]!r} follows the calls, "
                    f"and {ends['text'].end!r}, which ends turns of text, is missing"
                )
        raise RenderError(
            f"no control token ends an assistant turn with {'tool calls' if kind == 'call' else 'text'}",
            remedy="pass the model's stop tokens as stop_token_ids",
        )

    def _unknown_closer(self, in_written: Sequence[str], last: str, ends: Mapping[Kind, TurnEnd]) -> str:
        """Return a string that closes a call turn although it is not a known stop, or "".

        The string must meet two conditions: a call turn without successor ends with the string, and a
        turn with two calls has it only once. It then closes the turn and not a single call.
        """
        string = self._at_end(last, in_written)
        if "text" not in ends or not string:
            return ""
        try:
            both = self.render([USER, self.assistant([probe_call(), probe_call(1)])], generation_prompt=False)
        except RenderError:
            return ""
        return string if [other for _, other in self.control.positions(both)].count(string) == 1 else ""

    def _at_end(self, last: str, in_written: Sequence[str]) -> str:
        """Return the control string at the end of `last` if it is also in `in_written`, else ""."""
        matches = self.control.positions(last)
        if not matches:
            return ""
        position, string = matches[-1]
        return "" if last[position + len(string) :].strip() or string not in in_written else string

    def _frames(self, between: str, end: str, last: str) -> bool:
        """Return True if words between an assistant's text and `end` belong to tags that close the turn.

        Such tags begin with a control string, and a turn without successor ends with `end` as well.
        """
        first, _ = self.control.search(between.lstrip()) or (-1, "")
        return first == 0 and self._at_end(last, [end]) == end

    def _plain_text(self, text: str) -> str:
        kept: list[str] = []
        position = 0
        for start, string in self.control.positions(text):
            kept.append(text[position:start])
            position = start + len(string)
        return "".join([*kept, text[position:]])


def _spelled(message: Plain, grammar: str) -> Plain:
    """Return a message whose calls are written in its content."""
    calls, spell = cast("list[Plain]", message.get("tool_calls") or []), GRAMMARS[grammar].spell
    if not calls or spell is None:
        return message
    text = spell([cast("Mapping[str, Any]", call["function"]) for call in calls])
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": f"{message.get('content') or ''}{text}"}


def probe_call(index: int = 0) -> Plain:
    """Return a call for a probe; its id has the nine characters that some templates need."""
    return {"id": f"probe000{index + 1}", "name": "get_weather"}


def probe_message(kind: Kind, content: str = PROBE, index: int = 0) -> Plain:
    """Return the message that follows the assistant turn of a probe."""
    if kind == "text":
        return {"role": "user", "content": content}
    call = probe_call(index)
    return {"role": "tool", "tool_call_id": call["id"], "name": call["name"], "content": content}


def _as_parts(message: Plain) -> Plain:
    content = message.get("content")
    if not isinstance(content, str) or message.get("role") == "tool":
        return message
    return {**message, "content": [{"type": "text", "text": content}] if content else []}
