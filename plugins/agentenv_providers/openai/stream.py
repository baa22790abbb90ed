"""Joins the pieces of a streamed answer to what the API would have answered in one piece.

Pieces of texts are joined. Pieces of lists, such as reasoning details and parts of content, are joined by
their index, or else with the part of the same kind before them. Of any other value the last one counts.
Providers number, name and repeat the pieces of calls in their own ways; `_add_call` tells them apart.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

from agentenv_providers.openai.reply import Unreadable

__all__ = ["joined"]

TEXTS = {"content", "reasoning_content", "reasoning", "refusal", "text", "thinking", "summary", "transcript"}
"""Keys of texts that come in pieces."""


async def joined(chunks: AsyncIterator[Any]) -> dict[str, Any]:
    """Join the chunks of a streamed answer into one answer of the usual form.

    Raises:
        EOFError: The stream ended in the middle of the answer.
        Unreadable: A chunk is none of a chat completion.
    """
    message: dict[str, Any] = {}
    finish: Any = None
    usage: Any = None
    whole = False
    async for chunk in chunks:
        if not isinstance(chunk, Mapping):
            raise Unreadable(f"a chunk of the stream is {chunk!r:.80}")
        said = cast("Mapping[str, Any]", chunk)
        choices = said.get("choices")
        usage = said.get("usage") or usage
        # The counts of the whole answer come last, in a chunk of their own.
        whole = usage is not None and not choices
        for choice in cast("list[Any]", choices) if isinstance(choices, list) else ():
            if not isinstance(choice, Mapping):
                raise Unreadable(f"a choice of the stream is {choice!r:.80}")
            held = cast("Mapping[str, Any]", choice)
            finish = held.get("finish_reason") or finish
            delta: object = held.get("delta") or held.get("message")
            if isinstance(delta, Mapping):
                _add(message, cast("Mapping[str, Any]", delta))
    if finish is None and not whole:
        raise EOFError("the stream ended in the middle of the answer")
    if "tool_calls" in message:
        ordered = sorted(message["tool_calls"], key=lambda call: call["index"])
        message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in ordered]
    return {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}


def _add(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add the next piece of a message."""
    for key, value in delta.items():
        if key == "tool_calls":
            for part in cast("list[Any]", value if isinstance(value, list) else [value] if value else []):
                if not isinstance(part, Mapping):
                    raise Unreadable(f"a piece of a tool call is {part!r:.80}")
                _add_call(message.setdefault("tool_calls", []), cast("Mapping[str, Any]", part))
        elif key == "function_call" and isinstance(value, Mapping):
            _add_function(message.setdefault(key, {}), cast("Mapping[str, Any]", value))
        else:
            message[key] = _merged(key, message.get(key), value)


def _merged(key: str, before: Any, value: Any) -> Any:
    """Return the value of a key of which another piece came."""
    if before is None or value is None:
        return before if value is None else value
    if key == "content" and isinstance(before, str) != isinstance(value, str):
        before, value = _as_parts(before), _as_parts(value)
    if isinstance(before, str) and isinstance(value, str):
        return before + value if key in TEXTS else value or before
    if isinstance(before, dict) and isinstance(value, dict):
        kept, new = cast("dict[str, Any]", before), cast("dict[str, Any]", value)
        return {name: _merged(name, kept.get(name), new.get(name)) for name in {**kept, **new}}
    if isinstance(before, list) and isinstance(value, list):
        items = list(cast("list[Any]", before))
        for item in cast("list[Any]", value):
            _add_item(items, item)
        return items
    return value


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _add_item(items: list[Any], item: Any) -> None:
    """Add a piece of a list to the item that it belongs to, or at the end."""
    if isinstance(item, dict):
        piece = cast("dict[str, Any]", item)
        index = piece.get("index")
        for place in reversed(range(len(items))) if index is not None else range(len(items))[-1:]:
            known = items[place]
            same = isinstance(known, dict) and all(
                cast("dict[str, Any]", known).get(name) == piece.get(name) for name in ("type", "index")
            )
            if same and (index is not None or piece.get("type") in {"text", *TEXTS}):
                items[place] = _merged("", known, piece)
                return
    items.append(item)


def _add_call(calls: list[dict[str, Any]], part: Mapping[str, Any]) -> None:
    """Add a streamed piece of a tool call to the pieces before it."""
    given, id = part.get("index"), part.get("id")
    index = given if isinstance(given, int) else calls[-1]["index"] if calls else 0
    flat = {key: part[key] for key in ("name", "arguments") if key in part}
    function = cast("Mapping[str, Any]", raw) if isinstance(raw := part.get("function"), Mapping) else flat
    of_index = [call for call in calls if call["index"] == index]
    with_id = [call for call in of_index if id and call.get("id") == id]
    call = (with_id or of_index or [None])[-1]
    if call is None or (not with_id and _begins(call, id, function)):
        begun: dict[str, Any] = {"index": index, "function": {}}
        calls.append(call := begun)
    for key, value in part.items():
        if key not in {"index", "function", *flat}:
            # Some servers give each piece of a call another id: the first one counts.
            call[key] = call.get("id") or value if key == "id" else _merged(key, call.get(key), value)
    _add_function(call["function"], function)


def _begins(call: Mapping[str, Any], id: object, function: Mapping[str, Any]) -> bool:
    """Return whether a piece without the id of the call before it begins another call.

    Some servers give all calls one index, and some leave out ids, so that only the name tells.
    """
    before = call["function"]
    name, arguments = function.get("name"), before.get("arguments") or ""
    if not (name and before.get("name")):
        return False
    if not isinstance(arguments, str) or _is_whole(arguments):
        return bool(id and call.get("id")) or name != before["name"] or bool(function.get("arguments"))
    if arguments:
        return False
    return bool(id and call.get("id")) or (name != before["name"] and bool(function.get("arguments")))


def _is_whole(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _add_function(function: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add a streamed piece of a function to the pieces before it; some repeat all that came so far."""
    for key, value in part.items():
        before = function.get(key)
        if key in ("name", "arguments") and isinstance(before, str) and isinstance(value, str):
            repeats = len(before) > 1 and value.startswith(before)
            function[key] = value if repeats else before + value
        else:
            function[key] = _merged(key, before, value)
