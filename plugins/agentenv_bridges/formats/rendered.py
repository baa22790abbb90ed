"""Rows that a chat template writes as their episode was sampled, from which a trainer of rows learns.

Families want arguments of calls as objects or as text, and a template without tools gets them described in
its messages, as in a run. The first form that gives what was sampled is taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import dropwhile
from os.path import commonprefix
from typing import Any, TypeAlias

from agentenv.core import RenderError, TokenSequence
from agentenv.render import ChatTemplate, ChatTokenizer, TextProtocol

__all__ = ["as_sampled", "with_objects"]

Row: TypeAlias = "dict[str, Any]"
SHOWN = 40
"""Number of characters that are shown of each text, from where they differ."""


def as_sampled(row: Row, sequence: TokenSequence, tokenizer: ChatTokenizer) -> tuple[Row, str]:
    """Return a row as the template writes what was sampled, or the nearest to it and where they differ.

    What follows the last sampled token is not compared, for nothing is learned from it.

    Args:
        row: the messages and tools, with arguments as text.
        sequence: the tokens of the episode.
        tokenizer: the tokenizer of the episode, with its template.
    """
    spans = list(dropwhile(lambda span: span.source not in {"model", "other"}, reversed(sequence.spans)))
    sampled = tokenizer.decode([token for span in reversed(spans) for token in span.token_ids]).rstrip()
    template = ChatTemplate(tokenizer.chat_template or "", tokenizer.special_tokens)
    best, otherwise, most = row, "", -1
    for form in _forms(row):
        try:
            text = template.render(form["messages"], tools=form["tools"] or None, generation_prompt=False)
        except RenderError as error:
            same, difference = 0, f"the template cannot write it: {error}"
        else:
            same, difference = _difference(tokenizer.decode(tokenizer.encode(text)), sampled)
        if same > most:
            best, otherwise, most = form, difference, same
        if not difference:
            break
    return best, otherwise


def with_objects(row: Row) -> Row:
    """Return a row whose calls have their arguments as objects; what is no object stays a text."""
    return {**row, "messages": [_with_objects(message) for message in row["messages"]]}


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls: list[Any] = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments")
        with suppress(ValueError, TypeError):
            read = json.loads(arguments)
            arguments = read if isinstance(read, dict) else arguments
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else message


def _forms(row: Row) -> Iterator[Row]:
    yield from (with_objects(row), row)
    # DeepSeek writes calls only where there is no text at all, and some models that see take parts alone.
    silent = [
        {**message, "content": None} if message.get("tool_calls") and not message["content"] else message
        for message in row["messages"]
    ]
    yield {**row, "messages": silent}
    for system_role in (True, False):
        plain = TextProtocol().plain(row["messages"], row["tools"], system_role=system_role, opening=True)
        parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in plain]
        yield from ({"messages": plain, "tools": []}, {"messages": parts, "tools": []})


def _difference(written: str, sampled: str) -> tuple[int, str]:
    """Return how many characters are equal, and what differs; empty if nothing does."""
    same = len(commonprefix([written, sampled]))  # noqa: RUF071 - of texts, which are no paths
    if same == len(sampled):
        return same, ""
    there, here = written[same : same + SHOWN], sampled[same : same + SHOWN]
    return same, f"the template writes {there!r} where {here!r} was sampled"
