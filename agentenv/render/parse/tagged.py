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

__all__ = ["Escape", "KeyValuePairs", "NamedJson", "TaggedParameters"]


_CDATA = "<![CDATA["
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
    call_closes: str
    parameter_opens: str
    parameter_closes: str
    name_ends: str = ">"
    newlines: bool = False
    """True if the line break after the opening tag and that before the closing tag are not in the value."""
    escape: Escape = Escape.NONE
    """What values are written with where they hold markup."""
    typed_by: str = ""
    """Name of an attribute after the key that is `true` for text and `false` for JSON."""

    def __call__(self, turn: TurnText, span: Span) -> Sequence[RawCall]:
        """Read every call of a block."""
        calls: list[RawCall] = []
        position = span.start
        while True:
            start = turn.find(self.call_opens, position)
            if start < 0 or start >= span.end:
                break
            end = turn.find(self.call_closes, start)
            if end < 0 or end >= span.end:
                calls.append(
                    RawCall(
                        status=CallStatus.UNCLOSED,
                        error=f"the call was not closed, so it was not run: end it with {self.call_closes}",
                    )
                )
                return calls
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
        name_end = turn.text.find(self.name_ends, span.start, span.end)
        if name_end < 0:
            return RawCall(status=CallStatus.MISSING_NAME, error="the call has no name")
        name = turn.text[span.start : name_end].strip().strip("\"'")
        if not name:
            return RawCall(status=CallStatus.MISSING_NAME, error="the call has no name")
        values: dict[str, str] = {}
        is_text: dict[str, bool] = {}
        position = name_end + len(self.name_ends)
        while 0 <= (start := turn.find(self.parameter_opens, position)) < span.end:
            between = turn.text[position:start]
            key_end = turn.text.find(">", start, span.end)
            found = self._value(turn, key_end + 1, span.end) if key_end >= 0 else None
            if found is None:
                return RawCall(
                    name,
                    status=CallStatus.BAD_ARGUMENTS,
                    error=f"a parameter of {name} was not closed: end it with {self.parameter_closes}",
                )
            value, position, tag = found
            key, text = self._parameter(turn.text[start + len(self.parameter_opens) : key_end])
            if tag:
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
            return stray_text(name, rest)
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

    def _parameter(self, header: str) -> tuple[str, bool | None]:
        """Return the key of a parameter, and whether it is text (None if the header does not say)."""
        if self.typed_by and (match := re.search(rf'\s{self.typed_by}="(true|false)"\s*\Z', header)):
            return header[: match.start()].strip().strip("\"'"), match.group(1) == "true"
        return header.strip().strip("\"'"), None


@dataclass(frozen=True, slots=True)
class KeyValuePairs:
    """Reads `NAME <arg_key>k</arg_key> <arg_value>v</arg_value> ...`."""

    key_opens: str = "<arg_key>"
    key_closes: str = "</arg_key>"
    value_opens: str = "<arg_value>"
    value_closes: str = "</arg_value>"
    name_closes: str = ""
    """The tag after the name; empty if there is none."""

    def __call__(self, turn: TurnText, span: Span) -> Sequence[RawCall]:
        """Read one call."""
        first = turn.find(self.name_closes or self.key_opens, span.start)
        name_end = first if 0 <= first < span.end else span.end
        name = turn.text[span.start : name_end].strip()
        if not name:
            return [RawCall(status=CallStatus.MISSING_NAME, error="the call has no name")]
        if "{" in name or "\n" in name:
            return [invalid(f"the call is not a name followed by {self.key_opens} and {self.value_opens}")]
        values: dict[str, str] = {}
        position = min(name_end + len(self.name_closes), span.end)
        while 0 <= (start := turn.find(self.key_opens, position)) < span.end:
            before, edges = position, [start + len(self.key_opens)]
            for tag in (self.key_closes, self.value_opens, self.value_closes):
                position = turn.find(tag, edges[-1])
                if position < 0 or position >= span.end:
                    error = f"an argument of {name} has no {tag}"
                    return [RawCall(name, status=CallStatus.BAD_ARGUMENTS, error=error)]
                edges += [position, position + len(tag)]
            key = turn.text[edges[0] : edges[1]].strip()
            if key in values:
                return [repeated(name, key)]
            if between := f"{turn.text[before:start]}{turn.text[edges[2] : edges[3]]}".strip():
                return [stray_text(name, between)]
            if tag := turn.sampled(edges[0], edges[1]) or turn.sampled(edges[4], edges[5]):
                return [held(name, tag)]
            if "<" in key or "\n" in key:
                return [stray_text(name, key)]
            if 0 <= turn.find(self.key_opens, edges[4]) < edges[5]:
                error = f"the argument {key!r:.80} of {name} was not closed: end it with {self.value_closes}"
                return [RawCall(name, status=CallStatus.BAD_ARGUMENTS, error=error)]
            values[key] = turn.text[edges[4] : edges[5]]
            position = edges[6]
        if (rest := turn.text[position : span.end]).strip():
            return [stray_text(name, rest)]
        return [RawCall(name, untyped=values)]
