"""Read calls that are written with tags: a name and JSON, or a name and tagged parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from xml.sax.saxutils import unescape

from agentenv.core.messages import CallStatus
from agentenv.render.parse.grammar import Block, RawCall, Span, TurnText, held, repeated, stray_text
from agentenv.render.parse.json_calls import arguments_call, invalid, strip_fence

__all__ = ["Escape", "NamedJson", "TaggedParameters"]


_CDATA = "<![CDATA["
_KIND = re.compile(r'(?:string|type)="\w+"')
_WHOLE = re.compile(r"\s*<[^{}]*>\s*(\{.*\})\s*<[^{}]*>\s*", re.DOTALL)
"""Matches all arguments as one JSON object between tags of its own."""
_ENTITIES = {"&quot;": '"', "&#34;": '"', "&apos;": "'", "&#39;": "'"}


class Escape(Enum):
    """How a template writes a value that holds markup."""

    NONE = auto()
    CDATA = auto()
    """Between `<![CDATA[` and `]]>`."""
    ENTITIES = auto()
    """With `&lt;` and the other entities of XML."""


@dataclass(frozen=True, slots=True)
class NamedJson:
    """Reads `name SEPARATOR {...}`: the name, a tag, and a JSON object."""

    separator: str
    tidy: Callable[[str], tuple[str, str]] | None = None
    """Function that makes `(name, call id)` from the text before the separator."""

    def __call__(self, turn: TurnText, span: Span) -> Sequence[RawCall]:
        """Read one call."""
        position = turn.find(self.separator, span.start)
        if position < 0 or position >= span.end:
            return [invalid(f"the call has no {self.separator} between its name and its arguments")]
        before = turn.text[span.start : position].strip()
        name, call_id = self.tidy(before) if self.tidy else (before, "")
        position += len(self.separator)
        if tag := turn.sampled(position, span.end):
            return [held(name, tag)]
        return [arguments_call(name, strip_fence(turn.text[position : span.end]), call_id)]


@dataclass(frozen=True, slots=True)
class TaggedParameters:
    """Reads `<function=NAME> <parameter=KEY>VALUE</parameter> ... </function>` and similar formats."""

    call_opens: str
    """The tag before the name; empty if a block is one call and begins with the name."""
    call_closes: str
    parameter_opens: str
    parameter_closes: str
    name_ends: str = ">"
    """What follows the name; if empty, the name ends where its parameters begin."""
    key_ends: str = ">"
    value_opens: str = ""
    """A tag between the key and the value; empty if there is none."""
    newlines: bool = False
    """True if the line break after the opening tag and that before the closing tag are not in the value."""
    escape: Escape = Escape.NONE
    """What values are written with where they hold markup."""

    def __call__(self, turn: TurnText, span: Span) -> Sequence[RawCall]:
        """Read every call of a block."""
        if not self.call_opens:
            return self._one(turn, span)
        calls: list[RawCall] = []
        position = span.start
        while 0 <= (start := turn.find(self.call_opens, position)) < span.end:
            end = turn.find(self.call_closes, start)
            if not 0 <= end < span.end:
                error = f"the call was not closed, so it was not run: end it with {self.call_closes}"
                return [*calls, RawCall(status=CallStatus.UNCLOSED, error=error)]
            calls.append(self._call(turn, Span(start + len(self.call_opens), end)))
            position = end + len(self.call_closes)
        return calls or [invalid(f"the call has no {self.call_opens}")]

    @property
    def block(self) -> Block:
        """One call without tags around it."""
        return Block(self.call_opens, self.call_closes, self._one)

    def _one(self, turn: TurnText, span: Span) -> Sequence[RawCall]:
        return [self._call(turn, span)]

    def _call(self, turn: TurnText, span: Span) -> RawCall:
        ends = turn.find(self.name_ends or self.parameter_opens, span.start)
        if not 0 <= ends < span.end:
            ends = span.start if self.name_ends else span.end
        name, _ = _named(turn.text[span.start : ends])
        if not name:
            return RawCall(status=CallStatus.MISSING_NAME, error="the call has no name")
        if "{" in name or "\n" in name:
            return invalid(f"the call is not a name followed by {self.parameter_opens}")
        return self._parameters(turn, name, Span(min(ends + len(self.name_ends), span.end), span.end))

    def _parameters(self, turn: TurnText, name: str, span: Span) -> RawCall:
        position = span.start
        values: dict[str, str] = {}
        is_text: dict[str, bool] = {}
        while 0 <= (start := turn.find(self.parameter_opens, position)) < span.end:
            header = start + len(self.parameter_opens)
            key_end = turn.find(self.key_ends, header)
            opens = turn.find(self.value_opens, key_end) if self.value_opens else key_end + len(self.key_ends)
            found = (
                self._value(turn, opens + len(self.value_opens), span.end) if 0 <= key_end <= opens else None
            )
            if found is None:
                error = f"a parameter of {name} was not closed: end it with {self.parameter_closes}"
                return RawCall(name, status=CallStatus.BAD_ARGUMENTS, error=error)
            between = turn.text[position:start] + turn.text[key_end + len(self.key_ends) : opens]
            value, position, tag = found
            key, text = _named(turn.text[header:key_end])
            if tag := tag or turn.sampled(header, key_end):
                return held(name, tag)
            if "<" in key or "\n" in key:
                return stray_text(name, key)
            if key in values:
                return repeated(name, key)
            if between.strip():
                return stray_text(name, between)
            values[key] = value
            if text is not None:
                is_text[key] = text
        if (rest := turn.text[position : span.end]).strip():
            whole = None if values else _WHOLE.fullmatch(rest)
            return arguments_call(name, whole.group(1)) if whole else stray_text(name, rest)
        return RawCall(name, untyped=values, is_text=is_text)

    def _value(self, turn: TurnText, start: int, limit: int) -> tuple[str, int, str] | None:
        """Return a value, the position after it, and a control token in it; None if nothing ends it.

        A value ends at its closing tag, or at the opening tag of the next parameter if that comes first.
        """
        if self.escape is Escape.CDATA and turn.text.startswith(_CDATA, start):
            close = turn.text.find("]]>" + self.parameter_closes, start, limit)
            if close >= 0:
                inside = turn.text[start:close].removeprefix(_CDATA).replace(f"]]]]>{_CDATA}>", "]]>")
                return inside, close + len("]]>") + len(self.parameter_closes), turn.sampled(start, close)
        end = turn.find(self.parameter_closes, start)
        following = turn.find(self.parameter_opens, start)
        if 0 <= following < limit and not 0 <= end < following:
            if self.value_opens:  # a value between tags of its own has no other end
                return None
            end, position = following, following
        elif 0 <= end < limit:
            position = end + len(self.parameter_closes)
        else:
            return None
        value = turn.text[start:end]
        if end == following:  # what stands between two parameters is no part of the value
            value = value.rstrip("\n")
            if "</" in value or value.rstrip().endswith(">"):  # a part of the closing tag
                return None
        if self.newlines:
            value = value.removeprefix("\n").removesuffix("\n")
        if self.escape is Escape.ENTITIES:
            value = unescape(value, _ENTITIES)
        return value, position, turn.sampled(start, end)


def _named(header: str) -> tuple[str, bool | None]:
    """Return a name or a key, and whether its value is text; None if no attribute behind it says so."""
    name, behind, attributes = header.strip().partition('" ')
    name = unescape(name, _ENTITIES) if behind else name
    kind = _KIND.search(attributes)
    return name.strip().strip("\"'"), kind and kind.group() in {'string="true"', 'type="string"'}
