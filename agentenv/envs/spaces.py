"""Gymnasium spaces for text and chat messages.

`gymnasium.spaces.Text` has a fixed character set: by default it refuses newlines and accents, and a set of
all characters takes seconds to build. The spaces of this module contain any text. Their samples are short
texts drawn from the space's own generator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import gymnasium
import numpy as np

from agentenv.core.messages import Message

__all__ = ["Action", "Chat", "Text"]

_ALPHABET = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:-+*/()?!\néß漢"
_SAMPLED_CHARS = 32
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class _JsonSpace(gymnasium.spaces.Space[Any]):
    """Base class of the three spaces, whose members are JSON values."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False, because text has no fixed size."""
        return False

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
    """Any text of at most `max_chars` characters.

    Args:
        max_chars: limit of characters; None means no limit.
        choices: texts that are valid actions. Samples, `mock` and random policies draw from them. Any other
            text is in the space too, because a model may write it.
        seed: seed of the samples.
    """

    def __init__(
        self,
        max_chars: int | None = None,
        *,
        choices: Sequence[str] = (),
        seed: int | np.random.Generator | None = None,
    ) -> None:
        super().__init__(seed)
        self.max_chars = max_chars
        self.choices = tuple(choices)

    def contains(self, x: object) -> bool:
        """Return whether `x` is a text of at most `max_chars` characters."""
        return isinstance(x, str) and (self.max_chars is None or len(x) <= self.max_chars)

    def sample(self, mask: object = None, probability: object = None) -> str:
        """Draw a choice, or a short text without choices; masks do not apply and are ignored."""
        if self.choices:
            return self.choices[int(self.np_random.integers(len(self.choices)))]
        return self._draw_text()[: self.max_chars]

    def __repr__(self) -> str:
        given = [] if self.max_chars is None else [f"max_chars={self.max_chars}"]
        given += [f"choices={self.choices}"] if self.choices else []
        return f"Text({', '.join(given)})"


class Chat(_JsonSpace):
    """A list of chat messages."""

    def contains(self, x: object) -> bool:
        """Return whether `x` is a list or tuple of chat messages."""
        if isinstance(x, str) or not isinstance(x, Sequence):
            return False
        return all(_is_message(message) for message in cast("Sequence[object]", x))

    def sample(self, mask: object = None, probability: object = None) -> list[Message]:
        """Draw one to three user messages; masks do not apply and are ignored."""
        return [
            {"role": "user", "content": self._draw_text()} for _ in range(int(self.np_random.integers(1, 4)))
        ]


class Action(_JsonSpace):
    """A model's action: an assistant message, or only its text."""

    def contains(self, x: object) -> bool:
        """Return whether `x` is text or an assistant message."""
        if isinstance(x, str):
            return True
        return _is_message(x) and cast("Message", x)["role"] == "assistant"

    def sample(self, mask: object = None, probability: object = None) -> Message:
        """Draw an assistant message with text; masks do not apply and are ignored."""
        return {"role": "assistant", "content": self._draw_text()}


def _is_message(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    message = cast("Mapping[str, object]", value)
    content = message.get("content")
    return message.get("role") in _ROLES and (content is None or isinstance(content, (str, list)))
