"""Random changes of right answers: almost right, wrong, empty and malformed ones."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

__all__ = ["JUNK", "changed_calls", "changed_text", "odd"]

JUNK = (
    "",
    " ",
    "nan",
    "I do not know",
    "[]",
    "{}",
    "1/0",
    "0",
    "-1",
    "[[1,2],[3]]",
    "1e309",
    "[1,",
    "∞",
    "\x00",
)
"""Answers that are never meant to be right."""

BROKEN = ("{", "null", "[]", "5", '"x"')
"""Arguments that are no JSON object."""

KINDS = (
    "right",
    "right",
    "value",
    "value",
    "type",
    "missing",
    "extra",
    "fewer",
    "twice",
    "order",
    "name",
    "broken",
    "none",
)


def odd(value: Any, rng: random.Random) -> Any:
    """Return another value, or the same one of another type."""
    if isinstance(value, bool):
        return rng.choice([not value, str(value), int(value)])
    if isinstance(value, int | float):
        return rng.choice([value + 1, str(value), float(value), -value, "abc", None])
    if isinstance(value, str):
        return rng.choice([value + "x", value.upper(), "", f" {value}", None, 5, [value], value + "'); x=('"])
    if isinstance(value, list):
        return rng.choice([value[::-1], value[:-1], value + value, json.dumps(value), {"a": value}])
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        return {**value, key: odd(value[key], rng)}
    return 0


def changed_calls(
    calls: list[tuple[str, dict[str, Any]]], rng: random.Random
) -> tuple[str, list[tuple[str, str]]]:
    """Return a kind of change, and the calls (name and text of the arguments) after it."""
    calls = copy.deepcopy(calls)
    kind = rng.choice(KINDS)
    if not calls:
        return ("none", []) if rng.random() < 0.5 else ("value", [("nothing", "{}")])
    at = rng.randrange(len(calls))
    name, values = calls[at]
    key = rng.choice(list(values)) if values else None
    if kind in {"value", "type"} and key is not None:
        values[key] = odd(values[key], rng) if kind == "value" else json.dumps(values[key])
    elif kind == "missing" and key is not None:
        values.pop(key)
    elif kind == "extra":
        values["surprise"] = 1
    elif kind == "fewer":
        calls.pop(at)
    elif kind == "twice":
        calls.insert(at, calls[at])
    elif kind == "order":
        rng.shuffle(calls)
    elif kind == "name":
        calls[at] = (f"{name}_x", values)
    elif kind == "none":
        calls = []
    written = [(name, json.dumps(values)) for name, values in calls]
    if kind == "broken":
        written[at] = (written[at][0], rng.choice(BROKEN))
    return kind, written


def changed_text(answer: str, rng: random.Random) -> str:
    """Return an answer after a change of its text."""
    words = answer.split(" ")
    kind = rng.randrange(9)
    if kind < 2:
        return answer
    if kind == 2:
        return rng.choice(JUNK)
    if kind == 3:
        return answer + rng.choice([" ", ".", "\n", "x", "0"])
    if kind == 4:
        return answer.upper() if rng.random() < 0.5 else answer.lower()
    if kind == 5:
        rng.shuffle(words)
        return " ".join(words)
    if kind == 6:
        return answer[: rng.randrange(len(answer) + 1)]
    if kind == 7:
        return "".join(str((int(c) + 1) % 10) if c.isdigit() and rng.random() < 0.3 else c for c in answer)
    return f"The answer is {answer}"
