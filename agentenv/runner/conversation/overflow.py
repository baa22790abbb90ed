"""Tool output over its limit: which end is kept, and the whole of it on disk for people."""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from agentenv.core.messages import ToolResult
from agentenv.runner.conversation.estimate import MAX_CHARS_PER_TOKEN

__all__ = ["FullOutputs", "Keep", "Measure", "cut"]

Keep: TypeAlias = Literal["middle", "head", "tail"]
"""What stays of a text that is too long: `middle` cuts out its middle, `head` and `tail` keep one end."""

_log = logging.getLogger(__name__)
_ROUNDS = 24


class Measure(Protocol):
    """How many tokens a text has, and how to shorten it."""

    def count(self, text: str) -> int:
        """Tokens of a text."""
        ...

    def trim(self, text: str, max_tokens: int) -> str:
        """The text itself if it fits, else head and tail around a marker."""
        ...


def cut(text: str, max_tokens: int, measure: Measure, keep: Keep = "middle") -> str:
    """Return the text if it has at most `max_tokens` tokens, else what is kept of it with a marker."""
    if max_tokens < 1:
        return ""
    window = MAX_CHARS_PER_TOKEN * max_tokens
    if len(text) <= window and measure.count(text) <= max_tokens:
        return text
    # Invariant: `fits` characters fit together with their marker, `over` characters do not.
    fits, over = 0, min(len(text), window) + 1
    if measure.count(_kept(text, 0, keep)) > max_tokens:
        return measure.trim(text, max_tokens)
    guess = over * 3 // 8
    for _ in range(_ROUNDS):
        if over - fits <= 1:
            break
        guess = min(max(guess, fits + 1), over - 1)
        size = measure.count(_kept(text, guess, keep))
        if size <= max_tokens:
            fits = guess
        else:
            over = guess
        step = (max_tokens - size) * max(guess, 1) // max(size, 1)
        guess = guess + step if step else (fits + over) // 2
    return _kept(text, fits, keep)


def _kept(text: str, chars: int, keep: Keep) -> str:
    """Return so many characters of the text, and a marker where the others stood."""
    tail = {"head": 0, "middle": chars // 2, "tail": chars}[keep]
    marker = f"... [{len(text) - chars} characters cut; to see them, ask for a smaller part] ..."
    parts = (text[: chars - tail], marker, text[len(text) - tail :])
    return "\n".join(part for part in parts if part)


class FullOutputs:
    """Files with the whole of what was cut: `EPISODE/turn-003-call-1.txt` in a directory.

    Args:
        directory: made when the first output is kept.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def keep(self, episode: str, turn: int, place: int, text: str) -> str:
        """Write one output; return its path in the directory, empty if it could not be written."""
        name = Path(file_name(episode)) / f"turn-{turn:03}-call-{place + 1}.txt"
        try:
            (self.directory / name).parent.mkdir(parents=True, exist_ok=True)
            (self.directory / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        except OSError as error:
            _log.warning("the whole output is not kept: %s", error)
            return ""
        return name.as_posix()

    def keep_cut(
        self, episode: str, turn: int, whole: tuple[ToolResult, ...], shown: tuple[ToolResult, ...]
    ) -> tuple[ToolResult, ...]:
        """Keep the outputs of a turn that were cut; return the results with their files named."""
        named: list[ToolResult] = []
        for place, (before, after) in enumerate(zip(whole, shown, strict=True)):
            if after.content == before.content or not isinstance(before.content, str):
                named.append(after)
            else:
                named.append(replace(after, full_output=self.keep(episode, turn, place, before.content)))
        return tuple(named)


def file_name(name: str) -> str:
    """Return a name that is one file's, and no other name's: changed names carry a digest."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".")[:80]
    if clean == name:
        return clean
    return f"{clean}-{hashlib.blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=4).hexdigest()}"
