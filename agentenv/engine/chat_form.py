"""The fields by which a chat API is asked for a reply of a form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.render.base import ReplyForm

__all__ = ["fields_of_form"]


def fields_of_form(form: ReplyForm, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of a request that ask for a form.

    Source: https://platform.openai.com/docs/api-reference/chat/create

    Args:
        form: what the reply must be.
        tools: the tools that the request has; a choice among tools that are described in a text is no field.
    """
    fields: dict[str, Any] = {}
    named = [{"type": "function", "function": {"name": name}} for name in form.calls]
    if form.schema == {"type": "object"}:
        fields["response_format"] = {"type": "json_object"}
    elif form.schema is not None:
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "reply", "schema": form.schema},
        }
    if not tools:
        return fields
    if form.schema is not None:
        fields |= {} if form.calls else {"tool_choice": "none"}
    elif len(named) == 1:
        fields["tool_choice"] = named[0]
    elif len(named) == len(tools):
        fields["tool_choice"] = "required"
    else:
        allowed = {"mode": "required", "tools": named}
        fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    return fields if form.many else {**fields, "parallel_tool_calls": False}
