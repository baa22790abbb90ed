"""Options for playing the episodes of a run, and how many of them run at once.

The limits of each episode are in `RunLimits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeAlias

from agentenv.core.errors import UsageError
from agentenv.core.fields import (
    NonNegativeInt,
    NonNegativeSeconds,
    PositiveInt,
    PositiveSeconds,
    check_fields,
)
from agentenv.core.limits import MAX_TOKENS_PER_TURN, DonePolicy, RunLimits, least
from agentenv.core.threads import open_files_left
from agentenv.engine.interface import ChatEngine, Engine, Features, Sampling, features_of

__all__ = [
    "DEFAULT_AT_ONCE",
    "AtOnce",
    "GroupPolicy",
    "Part",
    "RunnerOptions",
    "episodes_at_once",
    "short_turns",
]

Part: TypeAlias = "str | Mapping[str, Any] | object | None"
"""A part of a run: its name, a table with its name and arguments, the part itself, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """What happens to a group when members fail (stop reason aborted or error).

    Raises:
        UsageError: A number is out of range.
    """

    on_failed: Literal["shrink", "refill"] = "shrink"
    """`refill` plays another member for each failed one, `shrink` does not. Failed members stay as data."""
    max_refills: NonNegativeInt = 2
    """Limit of extra members in one group."""
    min_usable: NonNegativeInt = 1
    """A group with fewer usable members is marked untrainable as a whole."""

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, group_size: int) -> None:
        """Check that groups of this size can satisfy the policy.

        Raises:
            UsageError: The size is below 1, or smaller than `min_usable`.
        """
        if group_size < 1:
            raise UsageError(f"group_size must be at least 1, not {group_size}")
        if self.min_usable > group_size:
            raise UsageError(f"min_usable is {self.min_usable}, but a group has only {group_size} members")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """Options of a `Runner`. They are the section `runner` of every configuration.

    Raises:
        UsageError: A value is out of range, or a name is unknown.
    """

    concurrency: PositiveInt | None = None
    """Limit of episodes that run at once. None means as many as the cache of the engine's servers holds, and
    32 for engines that do not know it."""
    retries: NonNegativeInt = 1
    """Further attempts at an episode after a temporary failure of infrastructure."""
    retry_wait_s: NonNegativeSeconds = 0.5
    """Wait before the first further attempt; the wait doubles with each attempt, up to 8 s. An episode whose
    attempt and waits would take longer than `episode_timeout_s` is not played again."""
    history: Literal["verbatim", "rewrite"] = "verbatim"
    """`verbatim` sends the tokens of earlier turns again, unchanged. `rewrite` renders all messages anew each
    turn, as a deployment would, and continues in a new sequence where the tokens differ, for example because
    the template drops thinking."""
    close_timeout_s: PositiveSeconds = 30.0
    """Time limit for closing an environment or a user, and for code to react to its cancellation."""
    lease_timeout_s: PositiveSeconds | None = 600.0
    """Time limit for getting a sandbox; this wait does not count towards the episode's deadline."""
    warn_after_s: PositiveSeconds | None = 300.0
    """Log what an episode waits for after this time; None disables the log."""
    condenser: Part = None
    """Shortens conversations that come near the context's limit: drop_tool_outputs, summarise,
    or the file.py:name or module:name of a `Condenser`. A table also has its arguments."""
    user: Part = None
    """Simulated user that replaces the environment's: model, scripted, or the file.py:name or module:name of
    a `User`, of a function of the messages and the task, or of a function of the task that returns a user."""
    score: Part = None
    """The file.py:name or module:name of a function that adds a reward to the environment's own. It names
    the parameters that it needs (trajectory, env, task) and returns a number."""
    done_policy: DonePolicy | None = None
    """Policy that replaces the environment's for an episode whose task is done."""
    group_policy: GroupPolicy = field(default_factory=GroupPolicy)
    """What happens to a group when members fail."""

    def __post_init__(self) -> None:
        check_fields(self)
        for kind, part in self._parts().items():
            # A run without such parts loads none of them.
            from agentenv.runner.named import check_part

            check_part(kind, part)

    def check_imports(self) -> None:
        """Import the parts that are named, and check the names of their arguments.

        Raises:
            UsageError: A part cannot be imported, or takes no such arguments.
        """
        for kind, part in self._parts().items():
            from agentenv.runner.named import check_import

            check_import(kind, part)

    def record(self) -> dict[str, Any]:
        """Return the options as plain values, for a run's record."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        for kind, part in self._parts().items():
            from agentenv.runner.named import part_record

            values[kind] = part_record(part)
        return {**values, "group_policy": asdict(self.group_policy)}

    def _parts(self) -> dict[str, object]:
        """Return the parts that are set, by kind."""
        parts = {"condenser": self.condenser, "user": self.user, "score": self.score}
        return {kind: part for kind, part in parts.items() if part is not None}


DEFAULT_AT_ONCE = 32
"""Number of episodes at once if neither the run nor the engine says anything."""


FILES_OF_AN_EPISODE = 4
"""Open files of an episode: a connection to a server, and the pipes of a process or those of a sandbox."""
RESERVED_FILES = 48
"""Open files of the run itself: its records, its event loop, libraries that are loaded on the way."""


@dataclass(frozen=True, slots=True)
class AtOnce:
    """How many episodes run at once."""

    number: int
    reason: str = ""
    """Why there are so many, as a sentence; empty if the run named the number, and for the default."""


def episodes_at_once(
    asked: int | None, engine: Engine | ChatEngine, limits: RunLimits, *, processes: int = 1
) -> AtOnce:
    """Return how many episodes this process plays at once.

    There are no more than the limit of open files allows, because an episode that finds none left fails.
    Unless the run names a number, as many run as fit into the cache of the engine's servers, where the engine
    knows its size: with fewer the servers idle, and with more they compute the same tokens again.

    Args:
        asked: the number that the run names, if it names one.
        engine: the engine that samples.
        limits: limits of the episodes, which say how long one can become.
        processes: number of processes that share the engine's servers.
    """
    wanted = AtOnce(asked) if asked is not None else _fitting(engine, limits, processes)
    left = open_files_left()
    room = None if left is None else max(1, (left - RESERVED_FILES) // FILES_OF_AN_EPISODE)
    if room is None or wanted.number <= room:
        return wanted
    return AtOnce(
        room,
        f"{room} episodes at once instead of {wanted.number}: this process may open {left} more files; raise "
        "the limit (ulimit -n) for more",
    )


def _fitting(engine: Engine | ChatEngine, limits: RunLimits, processes: int) -> AtOnce:
    """Return how many episodes fit into the cache of the engine's servers."""
    context = least(limits.max_context_tokens, engine.max_context_tokens)
    fit = features_of(engine).episodes_at_once(context) if context else None
    if context is None or fit is None:
        return AtOnce(DEFAULT_AT_ONCE)
    number = max(1, fit // processes)
    # Few episodes fill the whole context of a model, so only a limit of the run makes the default smaller.
    if limits.max_context_tokens is None and number <= DEFAULT_AT_ONCE:
        return AtOnce(DEFAULT_AT_ONCE)
    where = f", shared by {processes} processes" if processes > 1 else ""
    return AtOnce(
        number,
        f"{number} episodes at once: the servers serve {fit} of at most {context} tokens{where}; "
        "set runner.concurrency for another number",
    )


def short_turns(features: Features, limits: RunLimits, sampling: Sampling) -> str:
    """Return a sentence about turns that end early because the model is small; empty if they do not."""
    if limits.max_tokens_per_turn or sampling.max_tokens or features.turn_tokens >= MAX_TOKENS_PER_TURN:
        return ""
    return (
        f"a turn ends at {features.turn_tokens} tokens, because the model is small; "
        "-o max_tokens_per_turn=N sets another number"
    )
