"""Snapshots: copies of an environment's state during an episode, which can be restored."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from agentenv.core.context import Context
from agentenv.core.errors import UsageError

__all__ = ["Snapshot", "put_back", "take"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of an environment's attributes, which can be restored any number of times."""

    owner: type
    attributes: Mapping[str, object]
    context: Context
    """The episode's context, without its sandbox and its record, which cannot be copied."""


def take(holder: object, context: Context, leave_out: Collection[str]) -> Snapshot:
    """Copy an object's attributes; attributes that share an object share its copy.

    Raises:
        UsageError: An attribute cannot be copied; the message names it.
    """
    saved = replace(context, state=copy.deepcopy(context.state), sandbox=None, draft=None)
    kept: dict[str, object] = {}
    memo: dict[int, object] = {id(context): saved}
    for name, value in vars(holder).items():
        if name in leave_out:
            continue
        try:
            kept[name] = copy.deepcopy(value, memo)
        except Exception as error:
            raise UsageError(
                f"{type(holder).__name__}.{name} cannot be copied ({type(error).__name__}: {error})",
                remedy="do not keep such objects in the instance, or override snapshot() and restore()",
            ) from error
    return Snapshot(type(holder), kept, saved)


def put_back(holder: object, snapshot: Snapshot, live: Context, leave_out: Collection[str]) -> None:
    """Restore an object's attributes and the state of its context from a snapshot.

    The context remains the object that the runner passed, and only its fields change.

    Raises:
        UsageError: The snapshot was taken of another class.
    """
    if snapshot.owner is not type(holder):
        raise UsageError(f"this is a snapshot of {snapshot.owner.__name__}, not of {type(holder).__name__}")
    saved = snapshot.context
    live.state = copy.deepcopy(saved.state)
    live.task, live.seed, live.turn = saved.task, saved.seed, saved.turn
    live.tool_calls_left = saved.tool_calls_left
    fresh = copy.deepcopy(dict(snapshot.attributes), {id(saved): live})
    attributes = vars(holder)
    for name in [name for name in attributes if name not in leave_out]:
        del attributes[name]
    attributes.update(fresh)
