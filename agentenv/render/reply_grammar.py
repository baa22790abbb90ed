"""Grammars of replies that must have a form, in Lark's form as llguidance reads it.

1. A reply is written as the model's template writes it, so the renderer reads it like any other. Line breaks
   around a call may be left out, because no reader needs them.
2. A tag that is a control token is that token; any other tag is text.
3. A model that thinks may think first, and must where its template begins the thinking.
4. JSON stands on one line: small models write white space for ever where they may.
"""

# ruff: noqa: RUF001 - DeepSeek writes its tags with a full-width bar
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentenv.core.errors import RenderError
from agentenv.render.control import ControlSet
from agentenv.render.parse.grammar import ToolIndex
from agentenv.render.parse.turn import TurnReader
from agentenv.render.protocol import ReplyForm

__all__ = ["CALL_FORMS", "CallForm", "reply_grammar"]


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls whose arguments are JSON are written: `begins` NAME `between` ARGUMENTS `ends`."""

    begins: str
    between: str
    ends: str
    joins: str = ""
    """Text between two calls."""
    before: str = ""
    """Text before the first call."""
    after: str = ""
    """Text after the last call."""


CALL_FORMS: Mapping[str, CallForm] = {
    "hermes": CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", joins="\n"),
    "deepseek_v3": CallForm(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        joins="\n",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": CallForm(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    "mistral_args": CallForm("[TOOL_CALLS]", "[ARGS]", ""),
    "mistral": CallForm('{"name": "', '", "arguments": ', "}", joins=", ", before="[TOOL_CALLS][", after="]"),
    "functionary_v31": CallForm("<function=", ">", "</function>"),
    "bare_json": CallForm('{"name": "', '", "parameters": ', "}", joins="; "),
}
"""The formats of calls, by the name of their grammar in `agentenv.render.parse.GRAMMARS`."""

_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_TEXT = r"/(.|\n)*/"


def reply_grammar(form: ReplyForm, reading: TurnReader, tools: ToolIndex, control: ControlSet) -> str:
    """Return the grammar of replies that have a form.

    Args:
        form: what a reply must be.
        reading: how replies are read.
        tools: the tools of the conversation.
        control: the control tokens.

    Raises:
        RenderError: No grammar is known for the way in which this model writes.
    """
    name = reading.grammar.name
    calls = CALL_FORMS.get(name)
    if reading.grammar.whole is not None or (form.calls and calls is None):
        known = ", ".join(CALL_FORMS)
        raise RenderError(
            f"this model writes tool calls in the format {name!r}, for which there is no grammar, so that "
            "a reply cannot be made to call a tool or to be JSON",
            remedy=f"leave tool_choice and the format of the output to the model; formats with one: {known}",
        )
    kinds: list[str] = []
    rules: list[str] = []
    if form.calls and calls is not None:
        kinds.append("calls")
        rules += _calls(form, calls, tools, control)
    if form.schema is not None:
        kinds.append("answer")
        rules.append(f"answer: %json {_schema(form.schema)}")
    thinking = _thinking(reading, control)
    return "\n".join([f"start: {thinking} ({' | '.join(kinds)})", *rules])


def _calls(form: ReplyForm, calls: CallForm, tools: ToolIndex, control: ControlSet) -> list[str]:
    def tag(text: str) -> str:
        return _literal(text, control, newline='"\\n"?')

    more = f"({tag(calls.joins)} call)*" if form.many else ""
    rules = [f"calls: {tag(calls.before)} call {more} {tag(calls.after)}"]
    each: list[str] = []
    for index, name in enumerate(form.calls):
        # Names stand inside the JSON of some formats, where they are written as JSON.
        written = json.dumps(json.dumps(name, ensure_ascii=False)[1:-1], ensure_ascii=False)
        each.append(f"{written} {_literal(calls.between, control)} arguments_{index}")
        schema: Mapping[str, Any] = {"type": "object", **tools.schemas.get(name, {})}
        if schema.get("properties") and "additionalProperties" not in schema:
            schema = {**schema, "additionalProperties": False}
        # A tool checks its arguments itself, so that it may have a schema that no grammar can express.
        rules.append(f"arguments_{index}: %json {_schema(schema, lenient=True)}")
    return [*rules, f"call: {tag(calls.begins)} ({' | '.join(each)}) {tag(calls.ends)}"]


def _schema(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    return json.dumps({**schema, "x-guidance": {**_JSON, "lenient": lenient}}, ensure_ascii=False)


def _thinking(reading: TurnReader, control: ControlSet) -> str:
    """Return the part of the rule for the thinking before the reply."""
    pairs = dict(reading.forms.tags)
    space = '"\\n"? "\\n"?'
    if opened := reading.forms.thinking_open:
        closes = pairs[opened]
        if closes not in control.strings:
            raise RenderError(
                f"this model ends its thinking with {closes}, which is not a token of its own, so that no "
                "grammar can tell where its reply begins",
                remedy="switch thinking off in the template",
            )
        return f"{_ANY_TEXT} {_literal(closes, control)} {space}"
    thinks = [
        f"{_literal(opens, control)} {_ANY_TEXT} {_literal(closes, control)} {space}"
        for opens, closes in pairs.items()
        if opens in control.strings and closes in control.strings
    ]
    return f"({' | '.join(thinks)})?" if thinks else ""


def _literal(text: str, control: ControlSet, newline: str = '"\\n"') -> str:
    """Return the rule for text of a template, in which control tokens stand by their ids."""
    parts: list[str] = []
    position = 0
    for start, string in [*control.positions(text), (len(text), "")]:
        for index, line in enumerate(text[position:start].split("\n")):
            parts += [newline] if index else []
            parts += [json.dumps(line, ensure_ascii=False)] if line else []
        if string:
            parts.append(f"<[{control.strings[string]}]>")
        position = start + len(string)
    return " ".join(parts)
