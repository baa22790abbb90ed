"""Options for playing the episodes of a run. The limits of each episode are in `RunLimits`."""

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
from agentenv.core.limits import DonePolicy
from agentenv.runner.named import BUILT_IN, check_import, check_part, part_record

__all__ = ["GroupPolicy", "Part", "RunnerOptions"]

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
    """Wait before the first further attempt; the wait doubles with each attempt."""
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
    keywords, summarise_passages, or the file.py:name or module:name of a `Condenser`. A table also has its
    arguments."""
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
        for kind in BUILT_IN:
            check_part(kind, getattr(self, kind))

    def check_imports(self) -> None:
        """Import the parts that are named, and check the names of their arguments.

        Raises:
            UsageError: A part cannot be imported, or takes no such arguments.
        """
        for kind in BUILT_IN:
            check_import(kind, getattr(self, kind))

    def record(self) -> dict[str, Any]:
        """Return the options as plain values, for a run's record."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        parts = {kind: part_record(values[kind]) for kind in BUILT_IN}
        return {**values, **parts, "group_policy": asdict(self.group_policy)}
