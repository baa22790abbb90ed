"""Parse the harmony format, in which a completion has messages with a channel, a recipient and a body."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from agentenv.core.messages import CallStatus
from agentenv.render.parse.grammar import RawCall, TurnText, WholeTurn
from agentenv.render.parse.json_calls import arguments_call

__all__ = ["harmony_turn"]

_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<|]+)")
_CHANNEL = re.compile(r"\s*(\w+)")


@dataclass(frozen=True, slots=True)
class _Part:
    header: str
    channel: str
    body: str
    closed: bool


def harmony_turn(turn: TurnText, *, ended: bool) -> WholeTurn:
    """Parse a completion that starts after `<|start|>assistant`.

    Args:
        turn: the completion without its last stop token.
        ended: whether a stop token ended the completion.
    """
    content: list[str] = []
    thinking: list[str] = []
    calls: list[RawCall] = []
    for part in _parts(turn, ended=ended):
        recipient = _RECIPIENT.search(part.header)
        if recipient is not None:
            calls.append(_call(recipient.group(1), part))
        elif part.channel == "analysis":
            thinking.append(part.body)
        else:
            content.append(part.body)
    return WholeTurn("\n".join(filter(None, content)), "\n".join(filter(None, thinking)), tuple(calls))


def _call(name: str, part: _Part) -> RawCall:
    text = f"{part.header}<|message|>{part.body}"
    if not part.closed:
        error = "the call was not closed, so it was not run"
        return RawCall(name, part.body, status=CallStatus.UNCLOSED, error=error, text=text)
    return replace(arguments_call(name, part.body), text=text)


def _parts(turn: TurnText, *, ended: bool) -> Iterator[_Part]:
    position = 0
    while position < len(turn.text):
        message = turn.find("<|message|>", position)
        if message < 0:
            if rest := turn.text[position:].strip():
                yield _Part("", "", rest, ended)
            return
        header = turn.text[position:message]
        body = message + len("<|message|>")
        ends = [(end, tag) for tag in (*_ENDS, "<|start|>") if (end := turn.find(tag, body)) >= 0]
        end, tag = min(ends) if ends else (len(turn.text), "")
        channel_at = header.find("<|channel|>")
        channel = _CHANNEL.match(header, channel_at + len("<|channel|>")) if channel_at >= 0 else None
        closed = tag in _ENDS or (not tag and ended)
        yield _Part(header, channel.group(1) if channel else "", turn.text[body:end], closed)
        position = end + (len(tag) if tag in _ENDS else 0)
        if turn.at("<|start|>", position):
            position += len("<|start|>")
