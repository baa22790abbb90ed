"""Limits of an episode: turns, tool calls, tokens and time. The runner enforces them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

from agentenv.core.fields import NonNegativeInt, PositiveInt, PositiveSeconds, check_fields
from agentenv.core.trajectory import StopReason

__all__ = [
    "DEFAULT_MAX_TURNS",
    "MAX_TOKENS_PER_TURN",
    "SMALL_TURN_TOKENS",
    "DonePolicy",
    "RunLimits",
    "least",
    "max_tokens_left",
]

DonePolicy: TypeAlias = Literal["stop", "explain"]
"""What the runner does when `is_done()` is true: it stops, or it tells the model and lets it answer once."""

DEFAULT_MAX_TURNS = 16
"""Assistant turns of an episode where neither the run nor the environment limits them."""
MAX_TOKENS_PER_TURN = 1024
"""Tokens of a turn where nobody limits them and the model is not small."""

SMALL_TURN_TOKENS = 128
"""Tokens of a turn of a small model where nobody limits them."""


class Stricter(Enum):
    """Which of two values of a field holds; a field whose annotation names no rule has the first."""

    SMALLER = auto()
    """The smaller number; None is no limit."""
    LARGER = auto()
    NAMED = auto()
    """The value of these limits, unless it is the default."""

    def of(self, mine: Any, theirs: Any, default: object) -> Any:
        """Return the value that holds."""
        if self is Stricter.NAMED:
            return theirs if mine == default else mine
        if mine is None or theirs is None:
            return theirs if mine is None else mine
        return (min if self is Stricter.SMALLER else max)(mine, theirs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Limits of an episode; `None` means no limit, except for `max_turns` and `max_tokens_per_turn`.

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
    max_tokens_per_turn: PositiveInt | None = None
    """Largest number of tokens sampled in one turn; `None` means 1,024, and 128 for an `hf:` model of fewer
    than 400 million parameters, which seldom says anything of use after them."""
    max_total_tokens: PositiveInt | None = None
    """Largest number of tokens sampled in the episode."""
    max_tool_output_tokens: PositiveInt | None = 4096
    """Largest number of tokens of one tool result; a longer result is cut."""
    tool_output_keep: Annotated[Literal["middle", "head", "tail"], Stricter.NAMED] = "middle"
    """Which part of a long tool result is kept. `middle` cuts out the middle and keeps head and tail."""
    min_answer_tokens: Annotated[PositiveInt, Stricter.LARGER] = 16
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
        """Return the limits that satisfy both, each field by the rule in its annotation."""
        if other is None:
            return self
        merged: dict[str, Any] = {}
        for field in fields(self):
            rule = _rules().get(field.name, Stricter.SMALLER)
            merged[field.name] = rule.of(getattr(self, field.name), getattr(other, field.name), field.default)
        return RunLimits(**merged)

    def with_times(self, times: Mapping[str, float]) -> RunLimits:
        """Return these limits with a task's own times in the place of defaults; other values stay.

        Args:
            times: seconds by the name of the limit.
        """
        free = {field.name for field in fields(self) if getattr(self, field.name) == field.default}
        return replace(self, **{name: seconds for name, seconds in times.items() if name in free})

    def reached(self, turns: int, sampled_tokens: int) -> tuple[StopReason | None, str]:
        """Return why no turn can follow, and the limit in words; None and no words if one can.

        Args:
            turns: assistant turns so far.
            sampled_tokens: tokens sampled so far in the episode.
        """
        if self.max_turns is not None and turns >= self.max_turns:
            return StopReason.MAX_TURNS, f"max_turns={self.max_turns}"
        if self.max_total_tokens is not None and sampled_tokens >= self.max_total_tokens:
            return StopReason.GENERATION_LENGTH, f"max_total_tokens={self.max_total_tokens}"
        return None, ""

    def filled(self, max_tokens_per_turn: int | None) -> RunLimits:
        """Return these limits with the default number of turns, if they have none, and tokens of a turn."""
        turns = DEFAULT_MAX_TURNS if self.max_turns is None else self.max_turns
        tokens = self.max_tokens_per_turn or max_tokens_per_turn
        return replace(self, max_turns=turns, max_tokens_per_turn=tokens)


@cache
def _rules() -> dict[str, Stricter]:
    """Return the rules that annotations name."""
    hints = get_type_hints(RunLimits, include_extras=True)
    extras = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: extra for name, marks in extras.items() for extra in marks if isinstance(extra, Stricter)}


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
