"""Completions of episodes that run long, kept outside the process that plays them, so that they survive it.

An episode whose process was lost is played again with the same seeds. Where its environment does again what
it did, the requests are the same, and each that was answered before gets the same completion again, with its
log-probabilities and weights versions. What differs is sampled as ever.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from hashlib import blake2b
from time import monotonic

from agentenv.engine.base import Completion, Sampling

__all__ = ["KeptTurns", "kept_turns"]

LONG_S = 60.0
"""Seconds after which an episode is long: before that, playing it again costs less than keeping it."""

kept_turns: ContextVar[KeptTurns | None] = ContextVar("kept_turns", default=None)
"""What keeps the completions of the running episode; None if nothing does."""


class KeptTurns:
    """The completions of one episode.

    Args:
        known: completions of an attempt that was lost, by their request.
    """

    def __init__(self, known: Mapping[str, Completion]) -> None:
        self._began = monotonic()
        self._known = known
        self._new: dict[str, Completion] = {}

    def take(self) -> dict[str, Completion]:
        """Return, once, the completions since the last call; none of an episode that is not long yet."""
        if monotonic() - self._began < LONG_S:
            return {}
        new, self._new = self._new, {}
        return new

    async def answer(
        self, prompt_ids: Sequence[int], sampling: Sampling, sample: Callable[[], Awaitable[Completion]]
    ) -> Completion:
        """Return the kept completion of a request, or one that `sample` returns."""
        request = blake2b(array("q", prompt_ids), person=b"turn", digest_size=16)
        request.update(repr(sampling).encode())
        key = request.hexdigest()
        if key in self._known:
            return self._known[key]
        done = await sample()
        if done.finish_reason != "abort" and sampling.seed is not None:
            self._new[key] = done
        return done
