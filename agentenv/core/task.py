"""One task: its fields and a stable id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

__all__ = ["Task", "TaskFields", "digest"]


class TaskFields(dict[str, object]):
    """A task's fields by name, and the id of the task they belong to."""

    def __init__(self, id: str, fields: Mapping[str, object]) -> None:
        super().__init__(fields)
        self.id = id


@dataclass(frozen=True, slots=True)
class Task:
    """One task to solve."""

    id: str
    """Unique in its set, and stable."""
    data: Mapping[str, object] = field(default_factory=dict[str, object])
    """The task's fields; read only."""

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> Task:
        """Make a task of its fields alone: its id is the field `id`, or else a digest of the content."""
        own = fields.get("id")
        id = digest(fields) if own is None else str(own)
        return cls(id, TaskFields(id, fields))


def digest(fields: Mapping[str, object], number: int = 0) -> str:
    """Return an id that follows from the content alone, so that it survives reordering and filtering.

    Args:
        fields: of the task.
        number: the task's place in its source; names it where a value cannot be written as JSON, for
            such a value has no digest that is the same everywhere.
    """
    try:
        text = json.dumps(fields, sort_keys=True, ensure_ascii=True)
    except (TypeError, ValueError):
        return f"row-{number}"
    return blake2b(text.encode(), digest_size=6).hexdigest()
