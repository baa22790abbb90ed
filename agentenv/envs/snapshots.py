"""Snapshots: copies of an environment's state during an episode, which can be restored."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from agentenv.core.episode_env import Context
from agentenv.core.errors import UsageError

__all__ = ["Snapshot", "put_back", "take"]

_REMEDY = "do not keep such objects there, or override snapshot() and restore()"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of an environment's attributes, which can be restored any number of times."""

    owner: type
    attributes: Mapping[str, object]
    context: Context
    """The episode's context, without its sandbox and its record, which cannot be copied."""
    shared: tuple[object, ...] = ()
    """Sandboxes, which are not copied: every execution begins in a clean directory, so that only files of
    `write_file` are not taken back. Sessions of a sandbox have a state, and refuse to be copied."""


def take(holder: object, context: Context, leave_out: Collection[str]) -> Snapshot:
    """Copy an object's attributes; attributes that share an object share its copy.

    Raises:
        UsageError: An attribute, or an entry of the context's state, cannot be copied; the message names it.
    """
    from agentenv.sandbox.sandbox import Sandbox

    attributes = vars(holder)
    held = [value for value in (context.sandbox, *attributes.values()) if isinstance(value, Sandbox)]
    shared = (*held, *(() if context.sandbox is None else (context.sandbox,)))
    owner = type(holder).__name__
    memo: dict[int, object] = {id(sandbox): sandbox for sandbox in shared}
    state = {
        key: _copied(f"{owner}.context.state[{key!r}]", context.state[key], memo) for key in context.state
    }
    memo[id(context)] = saved = replace(context, state=state, sandbox=None, draft=None)
    kept = {
        name: _copied(f"{owner}.{name}", value, memo)
        for name, value in attributes.items()
        if name not in leave_out
    }
    return Snapshot(type(holder), kept, saved, shared)


def _copied(name: str, value: object, memo: dict[int, object]) -> object:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise UsageError(
            f"{name} cannot be copied ({type(error).__name__}: {error})", remedy=_REMEDY
        ) from error


def put_back(holder: object, snapshot: Snapshot, live: Context, leave_out: Collection[str]) -> None:
    """Restore an object's attributes and the state of its context from a snapshot.

    The context remains the object that the runner passed, and only its fields change.

    Raises:
        UsageError: The snapshot was taken of another class.
    """
    if snapshot.owner is not type(holder):
        raise UsageError(f"this is a snapshot of {snapshot.owner.__name__}, not of {type(holder).__name__}")
    saved = snapshot.context
    memo: dict[int, object] = {id(sandbox): sandbox for sandbox in snapshot.shared}
    live.state = copy.deepcopy(saved.state, memo)
    live.task, live.seed, live.turn = saved.task, saved.seed, saved.turn
    live.tool_calls_left, live.attempt = saved.tool_calls_left, saved.attempt
    memo[id(saved)] = live
    fresh = copy.deepcopy(dict(snapshot.attributes), memo)

    attributes = vars(holder)
    for name in [name for name in attributes if name not in leave_out]:
        del attributes[name]
    attributes.update(fresh)
