"""Every field of the requests of the three APIs, and what is done with it.

1. A field that is `followed` does what the API says.
2. A field that is `counted` does nothing, because the run's own settings replace it, or because only servers
   of the API's owner can do it. The episode counts it as `ignored_NAME`, and so fields that are not listed.
3. A field that is `refused` gets HTTP 400, because the answer would not be the one that was asked for.
4. A field that is `idle` asks nothing of the model: it is about the account, the bill, caches or storage.

A value that asks for nothing, such as `n: 1`, is neither counted nor refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

from agentenv.endpoint.request import NotAnswered

__all__ = ["CHAT", "MESSAGES", "RESPONSES", "Done", "ignored_in", "table"]

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
