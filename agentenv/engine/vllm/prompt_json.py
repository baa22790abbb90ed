"""The JSON of prompts that grow from turn to turn: only the ids that are new are written."""

from __future__ import annotations

from typing import NamedTuple

from pydantic_core import to_json

__all__ = ["PromptJSON"]

MIN_TOKENS = 2048
"""Shorter prompts are written anew, which takes no longer than comparing them."""
MAX_BYTES = 32_000_000
"""Most bytes of JSON that are kept, together with about as much for the ids."""


class _Kept(NamedTuple):
    ids: list[int]
    text: bytes
    """The JSON of the ids, without the bracket that closes it."""


class PromptJSON:
    """Writes prompts as JSON, and keeps the last prompt of each episode.

    A prompt is always compared with the kept one, so the result never depends on what is kept.
    """

    # Invariant: `_size` is the sum of the lengths of all kept texts, and at most `MAX_BYTES`.

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._size = 0

    def write(self, session_id: str | None, prompt: list[int]) -> bytes:
        """Return a prompt as a JSON array.

        Args:
            session_id: the episode whose prompt it is.
            prompt: the ids, which nobody may change afterwards.
        """
        if session_id is None or len(prompt) < MIN_TOKENS:
            return to_json(prompt)
        text = self._grown(self._kept.get(session_id), prompt)
        self.forget(session_id)
        self._keep(session_id, _Kept(prompt, text))
        return text + b"]"

    def forget(self, session_id: str) -> None:
        """Drop the prompt of an episode."""
        if (kept := self._kept.pop(session_id, None)) is not None:
            self._size -= len(kept.text)

    def _grown(self, kept: _Kept | None, prompt: list[int]) -> bytes:
        if kept is not None and prompt[: len(kept.ids)] == kept.ids:
            new = prompt[len(kept.ids) :]
            return kept.text + b"," + to_json(new)[1:-1] if new else kept.text
        return to_json(prompt)[:-1]

    def _keep(self, session_id: str, kept: _Kept) -> None:
        """Keep a prompt, and drop the prompts that were not used for the longest time."""
        if len(kept.text) > MAX_BYTES:
            return
        self._kept[session_id] = kept
        self._size += len(kept.text)
        while self._size > MAX_BYTES:
            self.forget(next(iter(self._kept)))
