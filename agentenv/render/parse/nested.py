"""Read calls whose arguments are nested tags: `MARK<invoke name="f">MARK<key>value MARK</key> ...`.

A mark precedes every tag, so that a value may contain any markup. A list is a row of `<item>` tags, an
object has one tag for each key, and an argument without a value is left out. Values have no types, so
the schema of the tool decides them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from agentenv.core.messages import CallStatus
from agentenv.render.parse.grammar import Nested, RawCall, Span, TurnText, repeated
from agentenv.render.parse.json_calls import invalid
from agentenv.render.parse.values import MAX_DEPTH

__all__ = ["NestedTags"]

_INVOKE = re.compile(r"invoke\s+name=[\"']?([^\"']*)[\"']?\s*\Z")


@dataclass(slots=True)
class _Node:
    tag: str
    text: str = ""
    children: list[tuple[str, Nested]] = field(default_factory=list[tuple[str, Nested]])

    def value(self) -> Nested:
        return tuple(self.children) if self.children or not self.text else self.text


@dataclass(frozen=True, slots=True)
class NestedTags:
    """Reads the calls of a block in which a mark precedes every tag."""

    mark: str

    def __call__(self, turn: TurnText, span: Span) -> Sequence[RawCall]:
        """Read every call of a block."""
        calls: list[RawCall] = []
        open_nodes: list[_Node] = []
        name = ""
        for tag, text in self._tags(turn, span):
            if not open_nodes:
                match = _INVOKE.match(tag)
                if match is None:
                    return [*calls, invalid(f'the call has no {self.mark}<invoke name="...">')]
                name = match.group(1).strip()
                open_nodes.append(_Node("invoke"))
            elif not tag.startswith("/"):
                if len(open_nodes) > MAX_DEPTH:
                    return [*calls, self._malformed(name, "its values are nested too deep")]
                open_nodes.append(_Node(tag.strip(), text))
            elif tag[1:].strip() != open_nodes[-1].tag:
                error = f"<{open_nodes[-1].tag}> is closed by <{tag}>"
                return [*calls, self._malformed(name, error)]
            else:
                node = open_nodes.pop()
                if open_nodes:
                    open_nodes[-1].children.append((node.tag, node.value()))
                else:
                    calls.append(self._call(name, node))
        if open_nodes:
            error = f"the call was not closed, so it was not run: end it with {self.mark}</invoke>"
            return [*calls, RawCall(name, status=CallStatus.UNCLOSED, error=error)]
        return calls or [invalid(f'the call has no {self.mark}<invoke name="...">')]

    def _tags(self, turn: TurnText, span: Span) -> Iterator[tuple[str, str]]:
        """Yield each tag with the text between it and the next one."""
        start = turn.find(self.mark, span.start)
        while 0 <= start < span.end:
            following = turn.find(self.mark, start + len(self.mark))
            stop = following if 0 <= following < span.end else span.end
            tag, _, text = turn.text[start + len(self.mark) : stop].removeprefix("<").partition(">")
            yield tag, text
            start = following

    def _call(self, name: str, node: _Node) -> RawCall:
        if not name:
            return RawCall(status=CallStatus.MISSING_NAME, error="the call has no name")
        keys = [key for key, _ in node.children]
        if twice := [key for key in keys if keys.count(key) > 1]:
            return repeated(name, twice[0])
        return RawCall(name, untyped=dict(node.children))

    def _malformed(self, name: str, error: str) -> RawCall:
        message = f"the arguments of {name} cannot be read: {error}"
        return RawCall(name, status=CallStatus.BAD_ARGUMENTS, error=message)
