"""Draw random tool calls from a tool's schema, with valid and invalid arguments."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.core.messages import ToolCallMessage, chat_call
from agentenv.engine.scripted.draw import Draw

__all__ = ["random_arguments", "random_call"]

_TEXTS = (
    "",
    "a",
    "naïve\n",
    "0",
    "-1",
    "x" * 500,
    '"; DROP TABLE t; --',
    "../../etc/passwd",
    "\x00",
    "漢字",
    "{}",
)
_WHOLE = (0, 1, -1, 2, 7, 10**6, -(10**12), 2**63)
_REAL = (0.0, -0.5, 1e-9, 3.25, 1e300)
_BROKEN = ("", "{", "[]", "null", '{"a": }', "not json", '{"a": NaN}', '{"a": 1, "a": 2}', '"text"')


def random_call(
    schemas: Sequence[Mapping[str, Any]], rng: random.Random, number: int, words: Sequence[str] = ()
) -> ToolCallMessage:
    """Return a random tool call as a model might write it; about one in three is invalid."""
    schema = rng.choice(schemas)["function"]
    arguments = random_arguments(schema["parameters"], rng, words)
    text = json.dumps(arguments)
    if rng.random() < 0.35:
        text = _spoil(arguments, rng)
    return chat_call(f"call_{number}", schema["name"], text)


def random_arguments(
    schema: Mapping[str, Any], rng: random.Random, words: Sequence[str] = ()
) -> dict[str, Any]:
    """Return random arguments that a JSON Schema of an object allows.

    Args:
        schema: JSON Schema of the object.
        rng: random generator.
        words: words that the environment has shown. Half of the texts are drawn from them, so that some
            calls pass the tool's first check of a name.
    """
    value = _Nasty(rng, schema, words).value(schema)
    return value if isinstance(value, dict) else {}


class _Nasty(Draw):
    """Draws texts and numbers at the edges of what a schema allows."""

    def __init__(self, rng: random.Random, root: Mapping[str, Any], words: Sequence[str]) -> None:
        super().__init__(rng, root, optional=0.5)
        self._words = words

    def text(self, schema: Mapping[str, Any]) -> str:
        """Return a text that the environment has shown, or one that code often stumbles over."""
        return self.random.choice(self._words if self._words and self.random.random() < 0.5 else _TEXTS)

    def number(self, low: float, high: float, *, whole: bool) -> float:
        """Return a number that code often stumbles over; the caller keeps it in the bounds."""
        return self.random.choice(_WHOLE if whole else (*_WHOLE, *_REAL))


def _spoil(arguments: dict[str, Any], rng: random.Random) -> str:
    """Return the arguments as JSON text with one mistake."""
    way = rng.randrange(5)
    spoiled = dict(arguments)
    if way == 0 or not spoiled:
        return rng.choice(_BROKEN)
    name = rng.choice(list(spoiled))
    if way == 1:
        del spoiled[name]
    elif way == 2:
        spoiled[name] = rng.choice([None, [], {}, "wrong", 1.5, True])
    elif way == 3:
        spoiled["unknown_argument"] = 1
    else:
        return json.dumps(arguments)[: -rng.randint(1, 3)]
    return json.dumps(spoiled)
