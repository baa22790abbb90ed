"""What an episode may spend: the limits that the runner enforces."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from typing import Literal, TypeAlias

from agentenv.core.errors import UsageError

__all__ = ["DonePolicy", "RunLimits"]

DonePolicy: TypeAlias = Literal["stop", "explain"]
"""What happens when `is_done()` is true: stop, or tell the model and let it answer once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Limits of an episode; `None` means no limit. The stricter of spec and run holds.

    Raises:
        UsageError: A limit is negative, zero where nothing could run, or not a number.
    """

    max_turns: int | None = 16
    """Assistant turns. Calls made on the last turn are not run."""
    max_user_turns: int | None = None
    """Turns of a simulated user; tool rounds do not count."""
    max_tool_calls: int | None = None
    """Tool calls in the episode; the calls over it are answered "not run"."""
    max_parse_errors: int | None = 4
    """Malformed tool calls told to the model before the episode is ended."""
    max_context_tokens: int | None = None
    """Prompt and completions together; the engine's own limit holds too."""
    max_tokens_per_turn: int | None = 1024
    """Sampled tokens of one turn."""
    max_total_tokens: int | None = None
    """Sampled tokens of the episode."""
    max_tool_output_tokens: int | None = 4096
    """Tokens of one tool result; what is over is cut."""
    tool_output_keep: Literal["middle", "head", "tail"] = "middle"
    """What stays of a tool result that is cut: head and tail (`middle` goes), `head`, or `tail`."""
    min_answer_tokens: int = 16
    """Room that must be left after an observation for the episode to go on."""
    tool_timeout_s: float | None = 30.0
    env_timeout_s: float | None = 120.0
    """One `reset` or `step` of the environment, its tools included."""
    turn_timeout_s: float | None = None
    """One generation."""
    reward_timeout_s: float | None = 120.0
    episode_timeout_s: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name == "tool_output_keep":
                if value not in {"middle", "head", "tail"}:
                    raise UsageError(f"tool_output_keep is 'middle', 'head' or 'tail', not {value!r}")
                continue
            least = 0 if field.name in {"max_tool_calls", "max_parse_errors", "max_user_turns"} else 1
            if field.name.endswith("_s"):
                if not isfinite(value) or value <= 0:
                    raise UsageError(f"{field.name} must be a positive number of seconds, not {value}")
            elif isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{field.name} must be a whole number of at least {least}, not {value!r}")

    def stricter(self, other: RunLimits | None) -> RunLimits:
        """Return the limits that satisfy both; of two numbers the smaller holds.

        Of two wishes what to keep of an output, one that is no default holds, else these limits' own.
        """
        if other is None:
            return self
        merged: dict[str, float | str | None] = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name == "min_answer_tokens":
                merged[field.name] = max(mine, theirs)
            elif field.name == "tool_output_keep":
                merged[field.name] = theirs if mine == field.default else mine
            elif mine is None or theirs is None:
                merged[field.name] = theirs if mine is None else mine
            else:
                merged[field.name] = min(mine, theirs)
        return RunLimits(**merged)  # pyright: ignore[reportArgumentType]
