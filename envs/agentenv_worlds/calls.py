"""Assistant messages with tool calls: those that oracles write, and the arguments that models write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.core import Message

__all__ = ["message_with_calls", "read_arguments"]

DEEPEST = 50
"""Lists inside of each other in the arguments of a call; the worlds' own code fails on deeper ones."""


def message_with_calls(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> Message:
    """Return an assistant message without text that makes these calls, each a name and its arguments."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(values)},
            }
            for number, (name, values) in enumerate(calls)
        ],
    }


def read_arguments(arguments: object) -> Any:
    """Return the arguments of a call, which are JSON text or a value already.

    Raises:
        ValueError: The text is no JSON, or the arguments are nested too deep.
    """
    try:
        value: Any = json.loads(arguments) if isinstance(arguments, str) else arguments
    except RecursionError as error:
        raise ValueError(f"they are nested more than {DEEPEST} deep") from error
    level: list[Any] = [[value]]
    for _ in range(DEEPEST):
        inside = [part.values() if isinstance(part, Mapping) else part for part in level]
        level = [part for parts in inside for part in parts if isinstance(part, (Mapping, list))]
        if not level:
            return value
    raise ValueError(f"they are nested more than {DEEPEST} deep")
