"""Write tool calls as a model makes them, for scripts and policies."""

from __future__ import annotations

import json

from agentenv.core.messages import Message, chat_call

__all__ = ["tool_call", "tool_call_message"]


def tool_call(name: str, /, **arguments: object) -> str:
    """Return the text with which a model of the `<tool_call>` grammar calls a tool.

    The text can be a turn of a `ScriptedEngine`; the template of `byte_tokenizer` writes calls this way. Join
    several calls in one turn with `+`.

    Example:
        >>> tool_call("add", a=1, b=2)
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'

    Args:
        name: name of the tool.
        arguments: arguments by parameter name, with values that JSON can represent.
    """
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def tool_call_message(name: str, /, **arguments: object) -> Message:
    """Return the assistant message, without text, that calls one tool.

    Policies for `play` and `check_env` return such messages, and a `ScriptedEngine` can play them too.

    Args:
        name: name of the tool.
        arguments: arguments by parameter name, with values that JSON can represent.
    """
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [chat_call("call_0", name, json.dumps(arguments))],
    }
