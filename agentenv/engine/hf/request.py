"""One request to the transformers engine, from its arrival to its completion."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from agentenv.core.errors import EngineError
from agentenv.core.routed_experts import RoutedExperts
from agentenv.core.supports import SupportsBuilder
from agentenv.engine.hf.sampler import UNIFORM_STEPS
from agentenv.engine.interface import Completion, FinishReason, OnTokens, Sampling

if TYPE_CHECKING:
    from agentenv.engine.hf.grammar import InGrammar
    from agentenv.engine.hf.seeing import PromptImage

__all__ = ["GenerationRequest"]


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """A request and the tokens sampled for it so far; only the worker changes it."""

    prompt: list[int]
    """The prompt's keys: token ids, and numbers below 0 for tokens of images."""
    sampling: Sampling
    stop: frozenset[int]
    max_tokens: int
    random: Random
    """The request's own random numbers, so that no other request changes what it draws."""
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    session_id: str | None = None
    created: float = field(default_factory=time.monotonic)
    deadline: float | None = None
    """Value of `time.monotonic()` at which the request is aborted."""
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
    images: Sequence[PromptImage] = ()
    """The images of the prompt, which are known as long as the request holds them."""
    apart: int = 0
    """In how many decoding passes the request is still computed by itself, because a pass with it failed."""
    times_apart: int = 0
    """How often it was set apart."""
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
    def longest(self) -> int:
        """Number of tokens of the context when all are sampled."""
        return len(self.prompt) + self.max_tokens

    @property
    def over(self) -> bool:
        """True when nobody waits for the request any more, or its deadline has passed."""
        return self.cancelled or (self.deadline is not None and time.monotonic() >= self.deadline)

    def start(self) -> None:
        """Record when the work on the request began."""
        if self.started is None:
            self.started = time.monotonic()

    def set_apart(self) -> None:
        """Let the request be computed by itself for a while, and for twice as long each time.

        A batch that fails whenever it is wide then costs a request few prefills more.
        """
        self.apart = 1 << self.times_apart
        self.times_apart += 1

    def uniform(self) -> float:
        """Return the next random number in [0, 1)."""
        return self.random.randrange(UNIFORM_STEPS) / UNIFORM_STEPS

    def add(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """Add one sampled token; return the finish reason if it ends the completion."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.tokens)))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.grammar is not None:
            self.grammar.take(token)
        if self.on_tokens is not None:
            self._tell(self.on_tokens, (token,))
        if token in self.stop or (self.ends_text is not None and self.ends_text(self.tokens)):
            return "stop"
        return "length" if len(self.tokens) >= self.max_tokens else None

    def finish(self, reason: FinishReason) -> None:
        """Answer the request with the sampled tokens."""
        ends = [start for _, start in self.versions[1:]] + [len(self.tokens)]
        started = time.monotonic() if self.started is None else self.started
        done = Completion(
            tuple(self.tokens),
            tuple(self.logprobs),
            reason,
            tuple((version, start, end) for (version, start), end in zip(self.versions, ends, strict=False)),
            queue_s=started - self.created,
            vocab_size=self.vocab_size,
            routed_experts=self.routed_experts,
            supports=None if self.supports is None else self.supports.freeze(),
            no_supports="" if self.supports is None else self.supports.reason,
        )
        self._tell(self._settle, self.future.set_result, done)

    def fail(self, error: EngineError) -> None:
        """Answer the request with an error."""
        self._tell(self._settle, self.future.set_exception, error)

    def _settle(self, settle: Callable[[Any], None], answer: Completion | EngineError) -> None:
        if not self.future.done():
            settle(answer)

    def _tell(self, call: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile, so nobody waits
            self.loop.call_soon_threadsafe(call, *arguments)
