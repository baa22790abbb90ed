"""Assistant messages with tool calls, which the oracles of adapters write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.core import Message

__all__ = ["message_with_calls"]


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
