"""The `repr` of results: one line that fits a terminal, whatever the result holds."""

from __future__ import annotations

from agentenv.core.visible import visible

__all__ = ["MAX_CHARS", "one_line"]

MAX_CHARS = 120


def one_line(value: object, *parts: object) -> str:
    """Return a `repr` of at most `MAX_CHARS` characters: the class and what tells its objects apart.

    Args:
        value: the object.
        parts: what to say of it; None and empty texts are left out.
    """
    told = ", ".join(" ".join(visible(str(part)).split()) for part in parts if part not in (None, ""))
    name = type(value).__name__
    room = MAX_CHARS - len(name) - 2
    return f"{name}({told if len(told) <= room else told[: room - 3] + '...'})"
