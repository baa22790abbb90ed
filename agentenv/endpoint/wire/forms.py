"""What a request says its reply must be: a call of some tool, or JSON of some schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, cast

from agentenv.core.messages import JsonValue
from agentenv.endpoint.request import NotAnswered
from agentenv.endpoint.wire.common import Json
from agentenv.render.protocol import ReplyForm

__all__ = ["choice_of", "form_of", "schema_in"]

_TYPES = {"any": "required", "tool": "function"}
"""Anthropic's words for what OpenAI's APIs call otherwise."""


def choice_of(choice: str | Json | None) -> Literal["auto", "none"]:
    """Return whether the model may call tools at all."""
    return "none" if _kind(choice) == "none" else "auto"


def form_of(
    choice: str | Json | None,
    tools: Sequence[Mapping[str, JsonValue]],
    schema: Mapping[str, JsonValue] | None,
    *,
    many: bool,
) -> ReplyForm | None:
    """Return what the reply must be; None if it may be anything.

    Args:
        choice: the request's choice of tools.
        tools: schemas of the tools.
        schema: the schema of the output; None if the request has none.
        many: whether the reply may have several calls.

    Raises:
        NotAnswered: The choice names a tool that there is not, or is of a kind that is not served.
    """
    kind = _kind(choice)
    names = tuple(str(cast("Json", tool["function"])["name"]) for tool in tools)
    wanted = _wanted(kind, choice, names)
    if wanted is None and schema is None:
        return None
    if wanted is None:
        return ReplyForm(calls=() if kind == "none" else names, many=many, schema=schema)
    if not wanted or not set(wanted) <= set(names):
        missing = next((name for name in wanted if name not in names), "any")
        raise NotAnswered(
            400, "invalid_request", f"tool_choice asks for {missing!r}, and no such tool is sent"
        )
    return ReplyForm(calls=wanted, many=many and kind != "function")


def schema_in(format: Json | None) -> Mapping[str, JsonValue] | None:
    """Return the JSON schema of an output format; None if the output may be any text.

    Raises:
        NotAnswered: The format is of a kind that is not served, or has no schema.
    """
    kind = (format or {}).get("type", "text")
    if format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise NotAnswered(400, "unsupported_value", f"output of the type {kind!r} is not served")
    # Chat completions nest the schema once more than responses and messages do.
    schema = (format.get("json_schema") or format).get("schema")
    if not isinstance(schema, dict):
        raise NotAnswered(400, "invalid_request", "the format of the output has no schema")
    return cast("Mapping[str, JsonValue]", schema)


def _kind(choice: str | Json | None) -> str:
    kind = str(choice.get("type") if isinstance(choice, dict) else choice or "auto")
    return _TYPES.get(kind, kind)


def _wanted(kind: str, choice: str | Json | None, names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the names of the tools one of which must be called; None if none must."""
    if kind in ("auto", "none"):
        return None
    if kind == "required":
        return names
    if isinstance(choice, dict) and kind == "function":
        return (str((choice.get("function") or choice)["name"]),)
    if isinstance(choice, dict) and kind == "allowed_tools":
        allowed = choice.get("allowed_tools") or choice
        some = tuple(str((tool.get("function") or tool)["name"]) for tool in allowed["tools"])
        if allowed.get("mode") == "required":
            return some
        # All of them is no restriction. Of fewer the model may call one or none, for which no form is known.
        if set(some) == set(names):
            return None
    raise NotAnswered(400, "unsupported_value", f"a tool_choice of the type {kind!r} is not served")
