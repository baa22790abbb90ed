"""Prove that what a template writes is read back, turn by turn, for the page of `agentenv doctor -m PATH`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from agentenv.core.errors import RenderError
from agentenv.core.messages import JsonValue, Message, chat_call
from agentenv.render.renderer import Renderer

__all__ = ["proved"]

_TOOL: Mapping[str, JsonValue] = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Keep a note.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "more": {"type": "object", "properties": {"a": {"type": "string"}}},
            },
        },
    },
}
_CALL = {"text": "plain", "count": 3}
_HARD = {
    "markup in a value": {"text": "a < b & c > d <e/>"},
    "line breaks at the ends of a value": {"text": "\nfirst\n\nsecond\n"},
    "quotes and backslashes in a value": {"text": "it's \"q\" \\ \\n 'x'"},
    "a text that looks like a number": {"text": "42", "count": 42},
    "a text that looks like nothing": {"text": "null"},
    "a closing tag in a value": {"text": "</parameter></arg_value></tool_call>"},
    "letters of other scripts": {"text": "é 漢字 🙂"},
    "lists and objects": {"tags": ["a", "1", "[x]"], "more": {"a": "{y}"}},
    "no arguments": {},
}


def proved(renderer: Renderer) -> Iterator[tuple[str, str]]:
    """Yield each kind of turn, and why it is not read back as it was written; empty where it is."""
    bound = renderer.bind([_TOOL])
    for what, message in _turns():
        try:
            bound.write(message)
        except RenderError as error:
            yield what, str(error)
        else:
            yield what, ""


def _turns() -> Iterator[tuple[str, Message]]:
    yield "one call", _turn(_CALL)
    yield "two calls in one turn", _turn(_CALL, {"text": "second"})
    yield "text before a call", _turn(_CALL, content="I keep it.")
    yield "thinking before a call", _turn(_CALL, thinking="A note is wanted.")
    yield "thinking before text", _turn(content="Done.", thinking="All is kept.")
    for what, arguments in _HARD.items():
        yield what, _turn(arguments)


def _turn(*calls: Mapping[str, object], content: str = "", thinking: str = "") -> Message:
    turn: Message = {"role": "assistant", "content": content}
    if thinking:
        turn["reasoning_content"] = thinking
    if calls:
        turn["tool_calls"] = [
            chat_call(f"probe000{index}", "note", json.dumps(arguments, ensure_ascii=False))
            for index, arguments in enumerate(calls)
        ]
    return turn
