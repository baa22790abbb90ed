"""Read the cases of llama.cpp's tests of its chat parsers out of their C++ text.

The cases are chains such as `tst.test("...").tools({ TOOL }).expect(MESSAGE).run()`, whose arguments are texts,
lists in braces and names of constants. A case that holds anything else is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<mark>[^(\s]*)\((?P<raw>.*?)\)(?P=mark)"|"(?P<text>(?:[^"\\]|\\.)*)"'
    r"|(?P<name>[A-Za-z_][\w:]*)|(?P<number>-?\d[\w.]*)|(?P<sign>'(?:[^'\\]|\\.)*'|\S)|\s+",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}
_PLACES = re.compile(
    r'peg_tester\(\s*(?:"(?P<template>[^"]+)")?|(?P<case>\.test\()|(?:const )?(?:std::string|auto)\s+'
    r'(?P<text>\w+)\s*=\s*(?=["R])|(?:static |const )*(?:std::vector<)?common_chat_(?:tool|msg)>?\s+'
    r"(?P<constant>\w+)\s*=?\s*(?=[{\w])"
)
_OTHER_KINDS = {"is_partial", "continue_final_message", "json_schema", "messages"}
"""Calls of a chain for what is not one whole turn."""


def _message(
    content: str = "", thinking: str = "", name: str = "", arguments: str = "", _id: str = ""
) -> Any:
    return [content, thinking, [[name, arguments]] if name else []]


_FUNCTIONS = {
    "simple_assist_msg": _message,
    "message_with_tool_calls": lambda name, arguments: _message("", "", name, arguments),
    "message_with_tool_calls_and_reasoning": lambda name, arguments, thinking: _message(
        "", thinking, name, arguments
    ),
    "message_with_reasoning_content_and_multiple_tool_calls": lambda thinking, content, calls: [
        content,
        thinking,
        calls,
    ],
    "message_with_content_and_tool_call": lambda content, name, arguments: _message(
        content, "", name, arguments
    ),
    "message_with_reasoning_and_tool_call": lambda thinking, name, arguments: _message(
        "", thinking, name, arguments
    ),
    "std::string": lambda text="", *_: text,
}


def recorded(llama_cpp: Path) -> Iterator[dict[str, Any]]:
    """Yield the cases of a folder with llama.cpp's source that are one whole turn."""
    source = (llama_cpp / "tests" / "test-chat.cpp").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    template = ""
    for place in _PLACES.finditer(source):
        if place.group().startswith("peg_tester"):
            template = Path(place["template"] or "").stem
            continue
        try:
            reader = _Expression(source, place.end(), names)
            if name := place["text"] or place["constant"]:
                names[name] = reader.value()
            elif template and (row := reader.case(template)) is not None:
                yield row
        except (ValueError, TypeError, IndexError):
            continue


class _Expression:
    """A C++ expression that is read from its first token on."""

    def __init__(self, source: str, start: int, names: dict[str, Any]) -> None:
        self._names = names
        self._tokens = _tokens(source, start)
        self._next = next(self._tokens)

    def case(self, template: str) -> dict[str, Any] | None:
        """Return the case of a chain that begins with its text; None if it is no whole turn."""
        (text,) = self._list(")")
        said: dict[str, Any] = {}
        while self._is("."):
            self._take()
            _, name = self._take()
            self._take()
            said[name] = next(iter(self._list(")")), True)
        if _OTHER_KINDS & {name for name, value in said.items() if value}:
            return None
        content, thinking, calls = said.get("expect") or _message()
        thinks = (
            said.get("reasoning_format", "COMMON_REASONING_FORMAT_NONE") != "COMMON_REASONING_FORMAT_NONE"
        )
        return {
            "family": template,
            "text": text,
            "tools": [
                {"name": tool[0], "parameters": json.loads(tool[2] or "{}") if len(tool) > 2 else {}}
                for tool in said.get("tools", ())
            ],
            "calls": [call[:2] for call in said.get("expect_tool_calls", calls)],
            "content": said.get("expect_content", content),
            # Where it is not asked for, thinking stays in the text.
            "thinking": said.get("expect_reasoning", thinking) if thinks else None,
            "kwargs": {"enable_thinking": said.get("enable_thinking", True)},
        }

    def value(self) -> Any:
        """Read a value."""
        value = self._operand()
        while self._is("+") or self._next[0] == "text":
            if self._is("+"):
                self._take()
            value += self._operand()
        return value

    def _is(self, sign: str) -> bool:
        return self._next == ("sign", sign)

    def _take(self) -> tuple[str, str]:
        taken, self._next = self._next, next(self._tokens, ("sign", ""))
        return taken

    def _list(self, closes: str) -> list[Any]:
        items: list[Any] = []
        while not self._is(closes):
            items.append(self.value())
            if self._is(","):
                self._take()
        self._take()
        return items

    def _operand(self) -> Any:
        kind, value = self._take()
        if kind in {"text", "number"}:
            return value
        if (kind, value) == ("sign", "{"):
            return self._list("}")
        if value in {"true", "false"}:
            return value == "true"
        if value in _FUNCTIONS and self._is("("):
            self._take()
            return _FUNCTIONS[value](*self._list(")"))
        if value.startswith("COMMON_"):
            return value
        if value not in self._names:
            raise ValueError(value)
        return self._names[value]


def _tokens(source: str, start: int) -> Iterator[tuple[str, str]]:
    for match in _TOKEN.finditer(source, start):
        if match["raw"] is not None:
            yield "text", match["raw"]
        elif match["text"] is not None:
            yield "text", _ESCAPE.sub(_unescaped, match["text"])
        elif match.lastgroup in {"name", "number", "sign"}:
            yield match.lastgroup, match.group()


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPED.get(code, code)
