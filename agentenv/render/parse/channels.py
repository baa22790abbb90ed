"""Parse turns made of channels: `<|open|>NAME KEY="VALUE"<|sep|> ... <|close|>NAME<|sep|>`.

Thinking, the answer and the calls each have a channel of their own. A call has one element for each
argument, and an attribute of the element says whether it is text or JSON. The prompt opens the first
channel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import unescape

from agentenv.core.messages import CallStatus
from agentenv.render.parse.grammar import RawCall, Span, TurnText, WholeTurn, held, repeated, stray_text
from agentenv.render.parse.json_calls import arguments_call, invalid

__all__ = ["channel_turn"]

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_THINK, _ANSWER, _CALLS = "think", "response", "tools"
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class _Element:
    name: str
    attributes: dict[str, str]
    inside: Span
    closed: bool
    whole: Span
    """The element with its tags."""


def channel_turn(turn: TurnText, *, ended: bool) -> WholeTurn:
    """Parse a completion that starts inside its first channel.

    Args:
        turn: the completion without its last stop token.
        ended: whether a stop token ended the completion.
    """
    texts: dict[str, list[str]] = {_THINK: [], _ANSWER: []}
    calls: list[RawCall] = []
    channels = sorted(_channels(turn, ended=ended), key=lambda channel: channel.whole.start)
    # The prompt opened the message around the channels.
    stray = _outside(turn, Span(0, len(turn.text)), channels).removesuffix(_closer("message"))
    for channel in channels:
        if channel.name == _CALLS:
            found = list(_elements(turn, channel.inside, "call"))
            calls += _calls(turn, channel.inside)
            stray = stray or _outside(turn, channel.inside, found) or (not found) * (_OPEN + _CALLS)
            continue
        text = turn.text[channel.inside.start : channel.inside.end]
        texts[channel.name].append(text)
        if channel.name == _THINK:
            hidden = _calls(turn, channel.inside)
            calls += [replace(call, status=CallStatus.IN_THINKING, error="") for call in hidden]
    calls += [invalid(f"{stray[:80]!r} stands outside of a call and of the answer", stray)] if stray else []
    return WholeTurn("\n".join(texts[_ANSWER]), "\n".join(filter(None, texts[_THINK])), tuple(calls))


def _channels(turn: TurnText, *, ended: bool) -> Iterator[_Element]:
    names = (_THINK, _ANSWER, _CALLS)
    closers = [(at, name) for name in names if (at := turn.find(_closer(name))) >= 0]
    openers = [at for name in names if (at := turn.find(_OPEN + name)) >= 0]
    first = min(openers, default=len(turn.text))
    position = 0
    if closers and min(closers)[0] < first:  # the prompt opened the channel that ends here
        end, name = min(closers)
        position = end + len(_closer(name))
        yield _Element(name, {}, Span(0, end), closed=True, whole=Span(0, position))
    elif first > 0:
        name = _ANSWER if ended or openers else _THINK
        yield _Element(name, {}, Span(0, first), closed=False, whole=Span(0, first))
    whole = Span(position, len(turn.text))
    yield from (element for name in names for element in _elements(turn, whole, name))


def _elements(turn: TurnText, within: Span, name: str) -> Iterator[_Element]:
    """Yield the elements of one name; the last one may be cut off."""
    opens, closes = _OPEN + name, _closer(name)
    position = within.start
    while 0 <= (start := turn.find(opens, position)) < within.end:
        header_end = turn.find(_SEP, start)
        if not 0 <= header_end < within.end:
            rest = Span(start, within.end)
            yield _Element(name, {}, Span(within.end, within.end), closed=False, whole=rest)
            return
        header = turn.text[start + len(opens) : header_end]
        inside = header_end + len(_SEP)
        if header and not header[0].isspace():
            position = inside
            continue
        end = turn.find(closes, inside)
        closed = end >= 0 and end + len(closes) <= within.end
        attributes = {key: unescape(value) for key, value in _ATTRIBUTE.findall(header)}
        position = end + len(closes) if closed else within.end
        content, whole = Span(inside, end if closed else within.end), Span(start, position)
        yield _Element(name, attributes, content, closed=closed, whole=whole)


def _closer(name: str) -> str:
    return f"{_CLOSE}{name}{_SEP}"


def _calls(turn: TurnText, within: Span) -> list[RawCall]:
    return [
        replace(_call(turn, element), text=turn.text[element.whole.start : element.whole.end])
        for element in _elements(turn, within, "call")
    ]


def _outside(turn: TurnText, within: Span, elements: Sequence[_Element]) -> str:
    """Return the text of a span that no element has."""
    edges = [
        within.start,
        *(edge for each in elements for edge in (each.whole.start, each.whole.end)),
        within.end,
    ]
    return "".join(turn.text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)).strip()


def _call(turn: TurnText, element: _Element) -> RawCall:
    name = element.attributes.get("tool", "")
    if not element.closed:
        error = f"the call was not closed, so it was not run: end it with {_closer('call')}"
        return RawCall(name, status=CallStatus.UNCLOSED, error=error)
    if not name:
        return RawCall(status=CallStatus.MISSING_NAME, error="the call has no name")
    for whole in _elements(turn, element.inside, "json"):
        return arguments_call(name, turn.text[whole.inside.start : whole.inside.end])
    values: dict[str, str] = {}
    is_text: dict[str, bool] = {}
    arguments = list(_elements(turn, element.inside, "argument"))
    if stray := _outside(turn, element.inside, arguments):
        return stray_text(name, stray)
    for argument in arguments:
        key = argument.attributes.get("key")
        if key is None or not argument.closed:
            error = f"an argument of {name} has no key, or no end"
            return RawCall(name, status=CallStatus.BAD_ARGUMENTS, error=error)
        if key in values:
            return repeated(name, key)
        if tag := turn.sampled(argument.inside.start, argument.inside.end):
            return held(name, tag)
        values[key] = turn.text[argument.inside.start : argument.inside.end]
        is_text[key] = argument.attributes.get("type") == "string"
    return RawCall(name, untyped=values, is_text=is_text)
