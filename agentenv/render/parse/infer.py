"""Infer a grammar from one rendered call, for model families without a built-in grammar.

Three kinds are inferred: a JSON call between two tags; a name, a tag and a JSON object; and tagged
parameters. An inferred grammar is used only if it parses the rendered calls correctly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from agentenv.render.parse.grammar import Block, Grammar
from agentenv.render.parse.json_calls import json_calls, json_items, json_members
from agentenv.render.parse.tagged import Escape, NamedJson, TaggedParameters

__all__ = ["inferred"]


def inferred(text: str, name: str, arguments: Mapping[str, object]) -> Iterator[Grammar]:
    """Yield the grammars that the text of one rendered call suggests."""
    starts = [0, *(match.end() for match in re.finditer(re.escape(name), text))][:4]
    makers = (
        _json_between_tags,
        _name_then_json,
        *(partial(_tagged, escape=each) for each in Escape),
    )
    for make in makers:
        for start in starts:  # a header may contain the name before the call does
            try:
                grammar = make(text[start:], name, list(arguments.items()))
            except ValueError:
                continue
            if grammar is not None:
                yield grammar


def _json_between_tags(text: str, name: str, _arguments: list[tuple[str, object]]) -> Grammar | None:
    start = text.rfind("{", 0, text.index(f'"{name}"'))
    if start < 0:
        return None
    if (bracket := text[:start].rstrip()).endswith("["):
        start = len(bracket) - 1
    _, end = json_items(text, start)
    opens, closes = _tag_before(text, start), _tag_after(text, end)
    return Grammar(f"json between {opens} and {closes}", (Block(opens, closes, json_calls),))


def _name_then_json(text: str, name: str, _arguments: list[tuple[str, object]]) -> Grammar | None:
    at = text.index(name)
    start = text.index("{", at)
    _, end = json_members(text, start)
    between = text[at + len(name) : start].strip()
    if not between:
        return None
    opens, closes = _tag_before(text, at), _tag_after(text, end)
    return Grammar(f"name {between} json", (Block(opens, closes, NamedJson(between)),))


def _tagged(text: str, name: str, arguments: list[tuple[str, object]], *, escape: Escape) -> Grammar | None:
    at = text.index(name)
    (first, value), (second, last) = arguments[:2]
    key = text.index(first, at + len(name))
    key_closes = text.index(">", key) + 1
    value_at = text.index(str(value), key_closes)
    last_at = text.index(str(last), text.index(">", text.index(second, value_at)))
    header = text[key + len(first) : key_closes]
    between = text[key_closes:value_at]
    parameter_opens = text[text.rindex("<", at + len(name), key) : key]
    parameter_closes = _tag_after(text, value_at + len(str(value)))
    after = text.index(parameter_closes, last_at) + len(parameter_closes)
    closes = _tag_after(text, after)
    read = TaggedParameters(
        "",
        "",
        parameter_opens,
        parameter_closes,
        name_ends=text[at + len(name) : text.index(parameter_opens, at)].strip(),
        key_ends=header if header.startswith("<") else ">",
        value_opens=between.strip(),
        newlines=between == "\n",
        escape=escape,
    )
    if text[:at].rstrip().endswith(">"):  # the name stands between two tags
        opens = _tag_before(text, at)
        return Grammar(f"keys and values between {opens} and {closes}", (Block(opens, closes, read),))
    call_opens = text[text.rindex("<", 0, at) : at]
    read = replace(read, call_opens=call_opens, call_closes=closes, name_ends=">")
    closes = _tag_after(text, text.index(closes, after) + len(closes))
    if not closes:
        return Grammar(f"tagged parameters in {call_opens}", (read.block,))
    opens = _tag_before(text, text.rindex("<", 0, at))
    return Grammar(
        f"tagged parameters between {opens} and {closes}", (Block(opens, closes, read), read.block)
    )


def _tag_before(text: str, position: int) -> str:
    """Return the tag that ends just before a position.

    Raises:
        ValueError: There is no tag before the position.
    """
    line = text[:position].rstrip().split("\n")[-1].strip()
    for opening, closing in (("<", ">"), ("[", "]")):
        if line.endswith(closing) and opening in line:
            line = line[line.rindex(opening) :]
    if len(line) < 3 or line.isalnum():
        raise ValueError("there is no tag")
    return line


def _tag_after(text: str, position: int) -> str:
    """Return the tag that starts just after a position, or the rest of the line if there is none."""
    line = text[position:].strip().split("\n")[0].strip()
    return line[: line.index(">") + 1] if line.startswith("<") and ">" in line else line
