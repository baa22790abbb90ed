"""One request to the transformers engine, from its arrival to its completion."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from agentenv.core.errors import EngineError
from agentenv.core.routed_experts import RoutedExperts
from agentenv.core.supports import SupportsBuilder
from agentenv.engine.base import Completion, FinishReason, OnTokens, Sampling
from agentenv.engine.hf.sampler import UNIFORM_STEPS

if TYPE_CHECKING:
    from agentenv.engine.hf.grammar import InGrammar
    from agentenv.engine.hf.seeing import Held

__all__ = ["GenerationRequest"]


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """A request and the tokens sampled for it so far; only the worker changes it."""

    prompt: list[int]
    """The prompt's keys: token ids, and numbers below 0 for tokens of images."""
    sampling: Sampling
    stop: frozenset[int]
    session_id: str | None
    max_tokens: int
    deadline: float | None
    """Value of `time.monotonic()` at which the request is aborted."""
    random: Random
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    created: float
    vocab_size: int | None = None
    ends_text: Callable[[list[int]], bool] | None = None
    """Says whether the sampled tokens end with a stop string; None if the request has none."""
    on_tokens: OnTokens | None = None
    """Is told each token on the event loop; None if nobody wants to know."""
    started: float | None = None
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Each weights version, with the index of the first token that it sampled."""
    routed_experts: RoutedExperts | None = None
    """Experts that the tokens were sent to, once the completion is whole; None if nobody asked for them."""
    supports: SupportsBuilder | None = None
    """The supports of the tokens; None if the request does not want them."""
    grammar: InGrammar | None = None
    """Says which tokens may come next; None if all may."""
    images: Sequence[Held] = ()
    """The images of the prompt, which are known as long as the request holds them."""
    cancelled: bool = False
    """Set from the event loop; the worker drops the request when it sees it."""

    @property
    def key(self) -> tuple[str, str | None] | None:
        """Key under which the row is kept between turns; None if it is not kept."""
        return None if self.session_id is None else (self.session_id, self.sampling.adapter)

    @property
    def context(self) -> list[int]:
        """Prompt and sampled tokens."""
        return self.prompt + self.tokens

    @property
    def left(self) -> int:
        """Number of tokens that may still be sampled."""
        return self.max_tokens - len(self.tokens)

    def start(self) -> None:
        """Record when the work on the request began."""
        if self.started is None:
            self.started = time.monotonic()

    def uniform(self) -> float:
        """Return the next random number in [0, 1)."""
        return self.random.randrange(UNIFORM_STEPS) / UNIFORM_STEPS

    def add(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """Add one sampled token; return the finish reason if it ends the completion."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.tokens)))
        self.tokens.append(token)
        if self.grammar is not None:
            self.grammar.take(token)
        self.logprobs.append(logprob)
        if self.on_tokens is not None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                self.loop.call_soon_threadsafe(self.on_tokens, (token,))
        if token in self.stop or (self.ends_text is not None and self.ends_text(self.tokens)):
            return "stop"
        return "length" if len(self.tokens) >= self.max_tokens else None

    @property
    def expired(self) -> bool:
        """True when the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def finish(self, reason: FinishReason) -> None:
        """Answer the request with the sampled tokens."""
        ends = [start for _, start in self.versions[1:]] + [len(self.tokens)]
        ranges = tuple(
            (version, start, end) for (version, start), end in zip(self.versions, ends, strict=False)
        )
        started = time.monotonic() if self.started is None else self.started
        self._answer(
            Completion(
                tuple(self.tokens),
                tuple(self.logprobs),
                reason,
                ranges,
                queue_s=started - self.created,
                vocab_size=self.vocab_size,
                routed_experts=self.routed_experts,
                supports=None if self.supports is None else self.supports.freeze(),
                no_supports="" if self.supports is None else self.supports.reason,
            )
        )

    def fail(self, error: EngineError) -> None:
        """Answer the request with an error."""
        self._answer(error)

    def _answer(self, answer: Completion | EngineError) -> None:
        def settle() -> None:
            if self.future.done():
                return
            if isinstance(answer, EngineError):
                self.future.set_exception(answer)
            else:
                self.future.set_result(answer)

        # If the loop was closed meanwhile, nobody waits for the answer.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(settle)
