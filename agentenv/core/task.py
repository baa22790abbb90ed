"""One task: its fields and a stable id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

__all__ = ["Task", "TaskFields", "digest"]


class TaskFields(dict[str, object]):
    """A task's fields by name, together with the task's id."""

    def __init__(self, id: str, fields: Mapping[str, object]) -> None:
        super().__init__(fields)
        self.id = id


@dataclass(frozen=True, slots=True)
class Task:
    """One task to solve."""

    id: str
    """Id of the task: unique in its task set, and the same in every run."""
    data: Mapping[str, object] = field(default_factory=dict[str, object])
    """The task's fields by name. Do not change them."""

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> Task:
        """Build a task from its fields. Its id is the field `id`, or a digest of the fields without one."""
        given_id = fields.get("id")
        id = digest(fields) if given_id is None else str(given_id)
        return cls(id, TaskFields(id, fields))


def digest(fields: Mapping[str, object], number: int = 0) -> str:
    """Return an id computed from the content alone, so that it survives reordering and filtering.

    Args:
        fields: fields of the task.
        number: position of the task in its source. The id is made from it if a value cannot be written
            as JSON, because such a value has no digest that is the same on every machine.
    """
    try:
        text = json.dumps(fields, sort_keys=True, ensure_ascii=True)
    except (TypeError, ValueError):
        return f"row-{number}"
    return blake2b(text.encode(), digest_size=6).hexdigest()
