"""Gymnasium spaces for text and chat messages.

`gymnasium.spaces.Text` has a closed character set: it refuses newlines and accents, and a set of
all characters takes seconds to build. These spaces hold any text; sampling draws short printable
text from the space's own generator.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import gymnasium
import numpy as np

from agentenv.core.messages import Message

__all__ = ["Action", "Chat", "Text", "fresh"]

_ALPHABET = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:-+*/()?!\néß漢"
_SAMPLED_CHARS = 32
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class _JsonSpace(gymnasium.spaces.Space[Any]):
    """What the three spaces share: members are JSON values, samples come from one generator."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no fixed size."""
        return False

    def fresh(self) -> _JsonSpace:
        """Return a copy with a generator of its own, not drawn from yet."""
        twin = copy.copy(self)
        twin._np_random = None  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue]
        return twin

    def _draw_text(self) -> str:
        length = int(self.np_random.integers(0, _SAMPLED_CHARS + 1))
        picks = self.np_random.integers(0, len(_ALPHABET), size=length)
        return "".join(_ALPHABET[pick] for pick in picks)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Text(_JsonSpace):
    """Any text of at most `max_chars` characters."""

    def __init__(
        self, max_chars: int | None = None, *, seed: int | np.random.Generator | None = None
    ) -> None:
        super().__init__(seed)
        self.max_chars = max_chars

    def contains(self, x: object) -> bool:
        """Return whether `x` is text of a fitting length."""
        return isinstance(x, str) and (self.max_chars is None or len(x) <= self.max_chars)

    def sample(self, mask: object = None, probability: object = None) -> str:
        """Draw a short text; masks do not apply and are ignored."""
        return self._draw_text()[: self.max_chars]

    def __repr__(self) -> str:
        return "Text()" if self.max_chars is None else f"Text(max_chars={self.max_chars})"


class Chat(_JsonSpace):
    """A list of chat messages."""

    def contains(self, x: object) -> bool:
        """Return whether `x` is a list or tuple of chat messages."""
        if isinstance(x, str) or not isinstance(x, Sequence):
            return False
        return all(_is_message(one) for one in cast("Sequence[object]", x))

    def sample(self, mask: object = None, probability: object = None) -> list[Message]:
        """Draw one to three messages of a user; masks do not apply and are ignored."""
        return [
            {"role": "user", "content": self._draw_text()} for _ in range(int(self.np_random.integers(1, 4)))
        ]


class Action(_JsonSpace):
    """What a model does: an assistant message, or its text alone."""

    def contains(self, x: object) -> bool:
        """Return whether `x` is text or an assistant message."""
        if isinstance(x, str):
            return True
        return _is_message(x) and cast("Message", x)["role"] == "assistant"

    def sample(self, mask: object = None, probability: object = None) -> Message:
        """Draw an assistant message of text; masks do not apply and are ignored."""
        return {"role": "assistant", "content": self._draw_text()}


def fresh(space: gymnasium.spaces.Space[Any]) -> gymnasium.spaces.Space[Any]:
    """Return a copy of a space with a generator of its own; cheap for the spaces of this module."""
    return space.fresh() if isinstance(space, _JsonSpace) else copy.deepcopy(space)


def _is_message(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    message = cast("Mapping[str, object]", value)
    content = message.get("content")
    return message.get("role") in _ROLES and (content is None or isinstance(content, (str, list)))
