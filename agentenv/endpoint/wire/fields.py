"""Every field of the requests of the three APIs, and what is done with it.

1. A field that is `followed` does what the API says.
2. A field that is `counted` does nothing, because the run's own settings replace it, or because only servers
   of the API's owner can do it. The episode counts it as `ignored_NAME`, and so fields that are not listed.
3. A field that is `refused` gets HTTP 400, because the answer would not be the one that was asked for.
4. A field that is `idle` asks nothing of the model: it is about the account, the bill, caches or storage.

A value that asks for nothing, such as `n: 1`, is neither counted nor refused. Fields of messages, of their
parts and of tools are counted as `ignored_PLACE_NAME`; those of them that are not listed are counted
together, as `ignored_unknown_field`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

from agentenv.endpoint.request import NotAnswered
from agentenv.endpoint.wire.client_tools import client_tool

__all__ = [
    "CHAT",
    "ITEM",
    "MESSAGE",
    "MESSAGES",
    "PART",
    "RESPONSES",
    "TOOL",
    "Done",
    "ignored_in",
    "ignored_in_messages",
    "ignored_in_tools",
    "table",
]

Done: TypeAlias = Literal["followed", "counted", "refused", "idle"]
"""What is done with a field."""


def table(**names: str) -> dict[str, Done]:
    """Return what is done with each field, from the names of those of each kind."""
    kinds: tuple[Done, ...] = ("followed", "counted", "refused", "idle")
    return {name: kind for kind in kinds for name in names.get(kind, "").split()}


CHAT: Mapping[str, Done] = table(
    followed="messages model tools tool_choice parallel_tool_calls max_tokens max_completion_tokens stop "
    "seed stream stream_options continue_final_message add_generation_prompt response_format",
    counted="temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty logit_bias "
    "logprobs top_logprobs reasoning_effort reasoning verbosity chat_template_kwargs "
    "web_search_options moderation",
    refused="n functions function_call audio modalities",
    idle="metadata user store service_tier safety_identifier prediction prompt_cache_key "
    "prompt_cache_options prompt_cache_retention",
)
"""Fields of OpenAI's chat completions, and those that servers of open models add."""
RESPONSES: Mapping[str, Done] = table(
    followed="input instructions model tools tool_choice parallel_tool_calls max_output_tokens "
    "previous_response_id stream stream_options text",
    counted="temperature top_p top_logprobs reasoning truncation max_tool_calls context_management "
    "include image moderation access_programs",
    refused="background background_options conversation prompt",
    idle="metadata user store service_tier safety_identifier client_metadata prompt_cache_key "
    "prompt_cache_options prompt_cache_retention",
)
"""Fields of OpenAI's responses."""
MESSAGES: Mapping[str, Done] = table(
    followed="messages model system tools tool_choice max_tokens stop_sequences stream thread output_config "
    "output_format",
    counted="temperature top_p top_k thinking mcp_servers context_management "
    "compaction container fallbacks speed",
    idle="metadata service_tier inference_geo cache_control betas diagnostics user_profile_id workspace_id "
    "billing_policy fallback_credit_token",
)
"""Fields of Anthropic's messages, those of its beta included."""
_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "include": (["reasoning.encrypted_content"],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Values that ask for nothing; so do null and what is empty."""
_MOST_UNKNOWN = 16
"""Fields that are not listed and are counted by their names; a client may send as many as it likes."""


def ignored_in(body: Mapping[str, Any], table: Mapping[str, Done]) -> Iterator[str]:
    """Yield the fields of a body that are counted.

    Raises:
        NotAnswered: A field asks for what is not served.
    """
    unknown = 0
    for name, value in body.items():
        # Clients send every field that they know, so what asks for nothing must not be refused.
        if value is None or value in ([], {}, "") or value in _NOTHING.get(name, ()):
            continue
        done = table.get(name)
        if done == "refused":
            told = f"{name} is not served here{_INSTEAD.get(name, '')}"
            raise NotAnswered(400, "unsupported_value", told)
        if done is None:
            unknown += 1
            known = name.isidentifier() and len(name) <= 40 and unknown <= _MOST_UNKNOWN
            yield name if known else "unknown_field"
        elif done == "counted":
            yield name


_INSTEAD: Mapping[str, str] = {
    "n": ": ask again for another answer",
    "functions": ": send tools",
    "function_call": ": send tools and tool_choice",
    "conversation": ": send previous_response_id, or the whole conversation",
    "background": ": wait for the answer, or have it streamed",
}
"""What to send in place of a field."""


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
        # Only a result's `name` is followed: a template shows which tool it is of, but no names of speakers.
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
