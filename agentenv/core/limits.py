"""What an episode may spend: the limits that the runner enforces."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from agentenv.core.bounds import NonNegativeInt, PositiveInt, PositiveSeconds, check_bounds

__all__ = ["DonePolicy", "RunLimits"]

DonePolicy: TypeAlias = Literal["stop", "explain"]
"""What happens when `is_done()` is true: stop, or tell the model and let it answer once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Limits of an episode; `None` means no limit. The stricter of spec and run holds.

    Raises:
        UsageError: A limit is negative, zero where nothing could run, or not a number.
    """

    max_turns: PositiveInt | None = 16
    """Assistant turns. Calls made on the last turn are not run."""
    max_user_turns: NonNegativeInt | None = None
    """Turns of a simulated user; tool rounds do not count."""
    max_tool_calls: NonNegativeInt | None = None
    """Tool calls in the episode; the calls over it are answered "not run"."""
    max_parse_errors: NonNegativeInt | None = 4
    """Malformed tool calls told to the model before the episode is ended."""
    max_context_tokens: PositiveInt | None = None
    """Prompt and completions together; the engine's own limit holds too."""
    max_tokens_per_turn: PositiveInt | None = 1024
    """Sampled tokens of one turn."""
    max_total_tokens: PositiveInt | None = None
    """Sampled tokens of the episode."""
    max_tool_output_tokens: PositiveInt | None = 4096
    """Tokens of one tool result; what is over is cut."""
    tool_output_keep: Literal["middle", "head", "tail"] = "middle"
    """What stays of a tool result that is cut: head and tail (`middle` goes), `head`, or `tail`."""
    min_answer_tokens: PositiveInt = 16
    """Room that must be left after an observation for the episode to go on."""
    tool_timeout_s: PositiveSeconds | None = 30.0
    """One tool call."""
    env_timeout_s: PositiveSeconds | None = 120.0
    """One `reset` or `step` of the environment, its tools included."""
    turn_timeout_s: PositiveSeconds | None = None
    """One generation."""
    reward_timeout_s: PositiveSeconds | None = 120.0
    """The rewards of an episode."""
    episode_timeout_s: PositiveSeconds | None = None
    """The whole episode."""

    def __post_init__(self) -> None:
        check_bounds(self)

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
