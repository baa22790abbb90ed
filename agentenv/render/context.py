"""Find out whether the text after a turn depends on the messages before the turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from agentenv.core.errors import RenderError
from agentenv.render.tail import PROBE_TOOL, USER, Kind, Plain, TailReader, TurnEnd, probe_call, probe_message

__all__ = ["dependences"]


def dependences(reader: TailReader, ends: Mapping[Kind, TurnEnd]) -> Iterator[tuple[Kind, str]]:
    """Yield the kinds of turns with what the text after them depends on."""
    for kind, end in ends.items():
        for name, before, tools in _contexts(reader, calls="call" in ends):
            if _differs(reader, kind, end, before, tools):
                yield kind, name


def _differs(
    reader: TailReader,
    kind: Kind,
    end: TurnEnd,
    before: Sequence[Plain],
    tools: Sequence[Mapping[str, object]] | None,
) -> bool:
    for count in (1, 2) if kind == "call" and not reader.habits.one_call else (1,):
        asked = [probe_call(), probe_call(1)][:count] if kind == "call" else []
        new = [probe_message(kind, index=index) for index in range(count)]
        try:
            alone = reader.cut(end, reader.tail(asked, new, tools=reader.tools_needed), end.end)
            full = reader.tail(asked, new, before=before, tools=tools)
        except RenderError:
            continue
        try:
            if reader.cut(end, full, end.end).text != alone.text:
                return True
        except RenderError:
            return True
    return False


def _contexts(
    reader: TailReader, *, calls: bool
) -> Iterator[tuple[str, Sequence[Plain], Sequence[Mapping[str, object]] | None]]:
    """Yield what may stand before a turn: its name, the messages and the tools."""
    said: Plain = {"role": "assistant", "content": "w"}
    tools = reader.tools_needed
    yield "tools", [USER], [PROBE_TOOL]
    yield "a system message", [{"role": "system", "content": "s"}, USER], tools
    yield "earlier turns", [USER, said, USER], tools
    yield "the user's earlier words", [{"role": "user", "content": "w"}], tools
    for count in (1, 2) if calls else ():
        called = reader.assistant([probe_call(5 + index) for index in range(count)])
        results = [probe_message("call", "r", 5 + index) for index in range(count)]
        name = f"an earlier turn with {count} call{'s' * (count > 1)}"
        yield name, [USER, called, *results], tools
        yield name, [USER, called, *results, said, USER], tools
