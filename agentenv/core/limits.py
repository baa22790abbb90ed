"""Limits of an episode: turns, tool calls, tokens and time. The runner enforces them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias

from agentenv.core.fields import NonNegativeInt, PositiveInt, PositiveSeconds, check_fields

__all__ = ["DEFAULT_MAX_TURNS", "MAX_TOKENS_PER_TURN", "DonePolicy", "RunLimits", "least", "max_tokens_left"]

DonePolicy: TypeAlias = Literal["stop", "explain"]
"""What the runner does when `is_done()` is true: it stops, or it tells the model and lets it answer once."""

DEFAULT_MAX_TURNS = 16
"""Assistant turns of an episode where neither the run nor the environment limits them."""
MAX_TOKENS_PER_TURN = 1024
"""Tokens of a turn where nobody limits them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Limits of an episode; `None` means no limit, except for `max_turns`.

    The environment's spec and the run may both set a limit; the stricter one holds.

    Raises:
        UsageError: A limit is negative, zero where nothing could run, or not a number.
    """

    max_turns: PositiveInt | None = None
    """Largest number of assistant turns; `None` means the environment's number, or 16 if it has none. Tool
    calls made on the last turn are not run. A captured conversation, which no environment ends, has no limit
    if this is `None`."""
    max_user_turns: NonNegativeInt | None = None
    """Largest number of turns of a simulated user; tool rounds do not count."""
    max_tool_calls: NonNegativeInt | None = None
    """Largest number of tool calls in the episode; further calls are answered "not run"."""
    max_tool_calls_per_turn: PositiveInt | None = None
    """Largest number of tool calls run in one turn; further calls are answered "not run", and the episode
    continues."""
    max_parse_errors: NonNegativeInt | None = 4
    """Number of malformed tool calls that the model is told about before the episode ends."""
    max_context_tokens: PositiveInt | None = None
    """Largest number of tokens of prompt and completions together; the engine's own limit holds too."""
    max_tokens_per_turn: PositiveInt | None = MAX_TOKENS_PER_TURN
    """Largest number of tokens sampled in one turn."""
    max_total_tokens: PositiveInt | None = None
    """Largest number of tokens sampled in the episode."""
    max_tool_output_tokens: PositiveInt | None = 4096
    """Largest number of tokens of one tool result; a longer result is cut."""
    tool_output_keep: Literal["middle", "head", "tail"] = "middle"
    """Which part of a long tool result is kept. `middle` cuts out the middle and keeps head and tail."""
    min_answer_tokens: PositiveInt = 16
    """Number of tokens that must be left after an observation; with fewer left the episode ends."""
    tool_timeout_s: PositiveSeconds | None = 30.0
    """Time limit of one tool call."""
    env_timeout_s: PositiveSeconds | None = 120.0
    """Time limit of one `reset` or `step` of the environment, including its tools."""
    turn_timeout_s: PositiveSeconds | None = None
    """Time limit of one generation. It truncates the episode, which may still be trained, so by default only
    the engine's own limit ends a hung request: that aborts the episode, which is played again."""
    reward_timeout_s: PositiveSeconds | None = 120.0
    """Time limit of computing an episode's rewards."""
    episode_timeout_s: PositiveSeconds | None = None
    """Time limit of the whole episode, which truncates it. Without one the episode still ends: its turns and
    each of its waits are limited."""

    def __post_init__(self) -> None:
        check_fields(self)

    def stricter(self, other: RunLimits | None) -> RunLimits:
        """Return the limits that satisfy both: the smaller of two numbers, the larger `min_answer_tokens`.

        `tool_output_keep` is taken from these limits, unless they have the default and `other` does not.
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

    def with_turns(self) -> RunLimits:
        """Return these limits with the default number of turns, if they have none."""
        return self if self.max_turns is not None else replace(self, max_turns=DEFAULT_MAX_TURNS)


def least(*bounds: int | None) -> int | None:
    """Return the smallest of the bounds; None if there is none."""
    return min((bound for bound in bounds if bound is not None), default=None)


def max_tokens_left(limits: RunLimits, asked: int | None, room: int | None, sampled: int) -> int:
    """Return how many tokens the next completion may have; 0 or less means none.

    Args:
        limits: limits of the episode.
        asked: `max_tokens` of the sampling settings; None leaves it to the limits.
        room: tokens left in the context; None if it has no limit.
        sampled: tokens sampled so far in the episode.
    """
    left = least(asked, limits.max_tokens_per_turn) or MAX_TOKENS_PER_TURN
    if limits.max_total_tokens is not None:
        left = min(left, limits.max_total_tokens - sampled)
    return left if room is None else min(left, room)
