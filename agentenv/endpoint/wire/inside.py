"""What is done with the fields inside of a request: those of messages, of their parts, and of tools.

The kinds are those of `agentenv.endpoint.wire.fields`. A field is counted as `ignored_PLACE_NAME`. Those that
are not listed are counted together, as `ignored_unknown_field`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from agentenv.endpoint.request import NotAnswered
from agentenv.endpoint.wire.client_tools import client_tool
from agentenv.endpoint.wire.fields import Done, table

__all__ = ["ITEM", "MESSAGE", "PART", "TOOL", "ignored_in_messages", "ignored_in_tools"]

MESSAGE: Mapping[str, Done] = table(
    followed="role content refusal reasoning_content reasoning tool_calls tool_call_id type",
    counted="name phase clear_at output_config",
    refused="audio function_call",
    idle="id status index parsed annotations cache_control reasoning_details provider_specific_fields",
)
"""Fields of messages of all three APIs. A `name` tells which tool a result is of, and is followed there."""
ITEM: Mapping[str, Done] = table(
    followed="type call_id name arguments output content summary",
    counted="caller namespace async encrypted_content",
    idle="id status",
)
"""Fields of the items of responses that are no messages: calls, their outputs, and reasoning."""
PART: Mapping[str, Done] = table(
    followed="type text refusal image_url source thinking id name input tool_use_id content",
    counted="detail transformations citations is_error caller toolset_name data",
    refused="file_id",
    idle="cache_control prompt_cache_breakpoint annotations logprobs signature",
)
"""Fields of the parts of a message, which are Anthropic's blocks."""
TOOL: Mapping[str, Done] = table(
    followed="type function name description parameters input_schema",
    counted="strict defer_loading allowed_callers input_examples output_schema async max_characters",
    idle="cache_control eager_input_streaming",
)
"""Fields of tools that the client runs."""


def ignored_in_messages(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the fields of messages and items, and of their parts, that are counted.

    Raises:
        NotAnswered: A field asks for what is not served.
    """
    for message in messages:
        is_item = "role" not in message and message.get("type", "message") != "message"
        of_tool = message.get("role") == "tool"
        told = {key: value for key, value in message.items() if key != "name"} if of_tool else message
        yield from _ignored("item" if is_item else "message", told, ITEM if is_item else MESSAGE)
        yield from _in_parts(message.get("content"))


def ignored_in_tools(tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the fields that are counted of tools that the client runs."""
    for tool in tools:
        kind = tool.get("type", "function")
        if kind == "namespace":
            yield from ignored_in_tools(tool["tools"])
        elif kind == "function" or "input_schema" in tool or client_tool(str(kind)) is not None:
            yield from _ignored("tool", tool, TOOL)
            function: object = tool.get("function")
            if isinstance(function, dict):
                yield from _ignored("tool", cast("Mapping[str, Any]", function), TOOL)


def _in_parts(content: object) -> Iterator[str]:
    for part in cast("list[object]", content) if isinstance(content, list) else ():
        if isinstance(part, dict):
            fields = cast("Mapping[str, Any]", part)
            yield from _ignored("part", fields, PART)
            image = fields.get("image_url")
            if isinstance(image, dict):
                yield from _ignored("part", {"detail": cast("Mapping[str, Any]", image).get("detail")}, PART)
            yield from _in_parts(fields.get("content"))


def _ignored(place: str, fields: Mapping[str, Any], known: Mapping[str, Done]) -> Iterator[str]:
    for name, value in fields.items():
        if value is None or value in (False, "", "auto", [], {}):
            continue
        done = known.get(name)
        if done == "refused":
            raise NotAnswered(400, "unsupported_value", f"{name} of a {place} is not served here")
        if done is None:
            yield "unknown_field"
        elif done == "counted":
            yield f"{place}_{name}"
