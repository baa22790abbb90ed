"""The in-process transformers engine: continuous batching, with keys and values kept for each episode.

1. One worker thread does all torch work. The event loop only passes requests to it and gets answers.
2. Requests join and leave the batch while others decode; all live requests decode together.
3. The keys and values of an episode are kept between its turns, so that only new tokens are prefilled.
   Their memory is bounded, and the oldest are dropped first; a dropped episode is prefilled again.
4. Each request has its own random numbers, so that other requests in the batch affect its result
   only by rounding.
5. After a change of weights, nothing that was computed with the old ones is used again: kept rows are
   dropped, live rows are prefilled again, and each token records the version that sampled it.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from agentenv.core.errors import EngineError, UsageError
from agentenv.core.images import ImageTokens
from agentenv.core.limits import MAX_TOKENS_PER_TURN, SMALL_TURN_TOKENS
from agentenv.core.supports import SupportsBuilder
from agentenv.engine.exact import room_for
from agentenv.engine.hf.adapters import base_model
from agentenv.engine.hf.batching import Batch
from agentenv.engine.hf.positions import context_limit
from agentenv.engine.hf.request import GenerationRequest
from agentenv.engine.hf.threads import dismiss_team
from agentenv.engine.hf.vision import vision_of
from agentenv.engine.interface import Completion, Features, OnTokens, Sampling
from agentenv.engine.stops import Decoder, stop_finder

if TYPE_CHECKING:
    from agentenv.engine.hf.grammar import Grammars, InGrammar
    from agentenv.engine.hf.seeing import PromptImage

__all__ = ["TransformersEngine"]

LINGER_S = 2.0
"""Seconds after which an idle worker thread ends; the next request starts a new one."""
EXIT_S = 10.0
"""Seconds that a process waits at its end for a worker to return from torch."""
SMALL_PARAMETERS = 400_000_000
"""A model of fewer parameters is small."""


class State(Enum):
    """What the worker of an engine does.

    | state       | a request comes   | `LINGER_S` without one | a pass begins | it ends   | `shutdown` |
    |-------------|-------------------|------------------------|---------------|-----------|------------|
    | `IDLE`      | starts: `WAITING` |                        |               |           | `CLOSED`   |
    | `WAITING`   | is taken          | ends: `IDLE`           | `COMPUTING`   |           | `CLOSED`   |
    | `COMPUTING` | is taken          |                        |               | `WAITING` | `CLOSING`  |
    | `CLOSING`   | is refused        |                        |               | `CLOSED`  |            |
    | `CLOSED`    | is refused        |                        |               |           |            |
    """

    IDLE = "there is no worker"
    WAITING = "it waits for requests, or for the end of a pause"
    COMPUTING = "it is in a forward pass"
    CLOSING = "it is in its last forward pass"
    CLOSED = "it ends, or has ended"

    @property
    def open(self) -> bool:
        """Whether the engine takes requests."""
        return self not in {State.CLOSING, State.CLOSED}

    @property
    def computes(self) -> bool:
        """Whether the worker uses the model."""
        return self in {State.COMPUTING, State.CLOSING}


class TransformersEngine:
    """Samples from a transformers model in this process; the trainer may share its weights.

    Example:
        >>> from agentenv.engine import load_engine
        >>> engine = load_engine("hf:path/to/model").engine  # doctest: +SKIP

    Args:
        model: a causal language model, which is used without a copy.
        tokenizer: finds the stop strings of `Sampling.stop` and follows `Sampling.grammar`; without one,
            requests with either are refused.
        name: the model string, which is stored in records.
        max_batch: most requests that decode together; further requests wait. None means 64, and 256 on CUDA.
        kept_bytes: memory for the keys and values of episodes between their turns. None means 1 GiB, and on
            CUDA a tenth of what is free.
        live_tokens: limit of the live requests' number times the tokens of the longest one; requests beyond
            it wait. None means 131,072, and on CUDA what a fifth of the free memory holds.
        max_context_tokens: context limit; that of the model's configuration if None.
        adapter: adapter of requests that leave the choice to the engine; None means the base model, which
            a request also gets with `Sampling(adapter=None)`.
        seed: seed from which requests without a seed get theirs.
        return_routed_experts: whether completions tell to which experts of a mixture their tokens were sent.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Decoder | None = None,
        *,
        name: str = "hf",
        max_batch: int | None = None,
        kept_bytes: int | None = None,
        live_tokens: int | None = None,
        max_context_tokens: int | None = None,
        adapter: str | None = None,
        seed: int = 0,
        return_routed_experts: bool = False,
    ) -> None:
        least = {"max_batch": (max_batch, 1), "live_tokens": (live_tokens, 1), "kept_bytes": (kept_bytes, 0)}
        if any(value is not None and value < most for value, most in least.values()):
            raise UsageError(
                "max_batch and live_tokens must be at least 1 and kept_bytes at least 0; got "
                f"{max_batch}, {live_tokens} and {kept_bytes}"
            )
        self.name = name
        self.model = model
        self.trained_by: object | None = None
        self._small = sum(weights.numel() for weights in model.parameters()) < SMALL_PARAMETERS
        self._tokenizer = tokenizer
        self.weights_version = 0
        self._tells_experts = return_routed_experts
        self._batch = Batch(
            model,
            max_batch=max_batch,
            kept_bytes=kept_bytes,
            live_tokens=live_tokens,
            tell_experts=return_routed_experts,
            vision=vision_of(base_model(model), getattr(tokenizer, "images", None)),
        )
        self._sight = self._batch.passes.sight
        config = self._batch.passes.config
        self.max_context_tokens: int | None = max_context_tokens or context_limit(config)
        self._vocab_size: int = config.vocab_size
        self._batch.adapters.check(adapter)
        self._adapter = adapter
        self._grammars: Grammars | None = None
        """What follows grammars, once a request had one."""
        self._seeds = Random(seed)
        self._changed = threading.Condition()
        """Guards the following, and tells of their changes."""
        self._state = State.IDLE
        self._pauses = 0
        """How many `updating` blocks are open, during which no pass begins."""
        self._orders: deque[Callable[[], None]] = deque()
        """What the worker must do before its next pass."""
        self._worker: threading.Thread | None = None

    @property
    def features(self) -> Features:
        """Images are taken if the model sees them and the tokenizer has the rule of its family."""
        return Features(
            images=self._sight is not None,
            grammars=True,
            experts=self._tells_experts,
            stream=self.generate,
            turn_tokens=SMALL_TURN_TOKENS if self._small else MAX_TOKENS_PER_TURN,
            sampled=lambda: self._batch.sampled,
        )

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_tokens: OnTokens | None = None,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
        images: Sequence[ImageTokens] = (),
    ) -> Completion:
        """Sample one completion, and tell its tokens as they are sampled; see `agentenv.engine.Engine`.

        Raises:
            ContextTooLong: The prompt leaves no room for a single token.
            EngineError: The forward pass failed or returned numbers that are not finite.
            UsageError: The prompt is empty, has ids outside the vocabulary, or names an unknown
                adapter; there are stop strings or a grammar and the engine has no tokenizer; or the grammar
                cannot be followed.
        """
        request = self._request(prompt_ids, sampling, stop_token_ids, images)
        request.session_id, request.on_tokens = session_id, on_tokens
        if deadline_s is not None:
            request.deadline = request.created + deadline_s
        with self._changed:
            if not self._state.open:
                raise EngineError(f"the engine {self.name} is closed", remedy="load the model again")
            if self._state is State.IDLE:
                self._start_worker()
            self._order(partial(self._batch.take, request))
        try:
            return await request.future
        finally:
            request.cancelled = True

    def _order(self, order: Callable[[], None]) -> None:
        """Let the worker do something before its next pass; without a worker it is done now."""
        with self._changed:
            if self._state is State.IDLE:
                order()
            else:
                self._orders.append(order)
                self._changed.notify_all()

    async def release(self, session_id: str) -> None:
        """Drop the keys and values of an episode."""
        self._order(partial(self._batch.release, session_id))

    async def close(self) -> None:
        """End the worker and free all keys and values; requests in flight fail."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self, wait_s: float | None = None) -> None:
        """Close the engine outside an event loop; wait at most `wait_s` seconds for the worker."""
        with self._changed:
            if self._state is State.IDLE:
                self._end()
            self._state = State.CLOSING if self._state.computes else State.CLOSED
            self._changed.notify_all()
            worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join(wait_s)

    def _end(self) -> None:
        self._batch.fail(EngineError(f"the engine {self.name} was closed"))

    def weights_updated(self, version: int | None = None) -> int:
        """Tell the engine that the weights of the model changed; return the new version.

        Nothing that was computed with the old weights is used again. If requests may be in flight,
        change the weights inside `updating()`.
        """
        with self._changed:
            self.weights_version = self.weights_version + 1 if version is None else version
            self._order(self._batch.forget)
            return self.weights_version

    @contextmanager
    def updating(self, version: int | Callable[[], int] | None = None) -> Generator[None]:
        """Pause the engine while weights change; this blocks, so do not call it on the event loop.

        Requests in flight wait and continue with the new weights afterwards.

        Args:
            version: version of the new weights, or a function that returns it at the end of the
                block; one more than the old version if None.
        """
        with self._changed:
            self._pauses += 1
            self._changed.wait_for(lambda: not self._state.computes)
        try:
            yield
        finally:
            with self._changed:
                # The pause ends even if `version` raises; the worker goes on once the lock is free.
                self._pauses -= 1
                self._order(self._batch.forget)
                self.weights_updated(version() if callable(version) else version)

    def stats(self) -> dict[str, int]:
        """Return counts since the start: tokens prefilled, reused and decoded, passes, images, bytes kept."""
        return self._batch.stats()

    def _request(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        images: Sequence[ImageTokens],
    ) -> GenerationRequest:
        prompt = list(prompt_ids)
        room = room_for(self.name, prompt, sampling.token_limit, self.max_context_tokens)
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            wrong = min(prompt) if min(prompt) < 0 else max(prompt)
            raise UsageError(
                f"the prompt has token id {wrong}, but the vocabulary of {self.name} ends at "
                f"{self._vocab_size - 1}",
                remedy="use the tokenizer of this model",
            )
        held: Sequence[PromptImage] = ()
        if self._sight is not None:
            prompt, held = self._sight.keys(prompt, images)
        elif images:
            raise UsageError(f"{self.name} sees no images", remedy="load a model that sees")
        sampling = replace(sampling, adapter=sampling.adapter_or(self._adapter))
        self._batch.adapters.check(sampling.adapter)
        loop, stop = asyncio.get_running_loop(), frozenset(stop_token_ids)
        return GenerationRequest(
            prompt=prompt,
            sampling=sampling,
            stop=stop,
            max_tokens=room,
            random=Random(self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed),
            loop=loop,
            future=loop.create_future(),
            vocab_size=self._vocab_size,
            ends_text=stop_finder(sampling.stop, self._reader(sampling).decode) if sampling.stop else None,
            supports=SupportsBuilder() if sampling.wants_support else None,
            images=held,
            grammar=self._grammar(sampling, stop) if sampling.grammar else None,
        )

    def _grammar(self, sampling: Sampling, stop: frozenset[int]) -> InGrammar:
        if not stop:
            raise UsageError("a completion that follows a grammar needs stop tokens", remedy="name them")
        if self._grammars is None:
            from agentenv.engine.hf.grammar import Grammars

            self._grammars = Grammars(self._reader(sampling), self._vocab_size, min(stop))
        return self._grammars.begin(sampling.grammar, stop)

    def _reader(self, sampling: Sampling) -> Decoder:
        if self._tokenizer is None:
            what = f"find the stop strings {list(sampling.stop)}" if sampling.stop else "sample by a grammar"
            raise UsageError(
                f"{self.name} cannot {what}: it has no tokenizer",
                remedy="load it with load_engine, or pass a tokenizer to TransformersEngine",
            )
        return self._tokenizer

    def _start_worker(self) -> None:
        import torch

        # OpenMP stores the number of threads for each calling thread, so the worker must set it to ours.
        threads = torch.get_num_threads()
        dismiss_team()

        def work() -> None:
            torch.set_num_threads(threads)
            self._work()

        self._state = State.WAITING
        self._worker = threading.Thread(target=work, name=f"agentenv-{self.name[:40]}", daemon=True)
        _engines.add(self)
        _workers.add(self._worker)
        self._worker.start()

    def _work(self) -> None:
        while self._next_turn():
            try:
                self._batch.turn()
            except Exception as cause:  # noqa: BLE001 - any failure is passed to the requests
                self._batch.fail(self._failure(cause))
            with self._changed:
                self._state = State.WAITING if self._state.open else State.CLOSED
                self._changed.notify_all()

    def _failure(self, cause: Exception) -> EngineError:
        error = EngineError(f"{self.name} failed: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error

    def _next_turn(self) -> bool:
        """Wait until there is something to compute; return False when the worker should end."""
        with self._changed:
            while True:
                while self._orders:
                    self._orders.popleft()()
                if self._state is State.CLOSED:
                    self._end()
                    return False
                if self._batch.has_work and not self._pauses:
                    self._state = State.COMPUTING
                    self._batch.version = self.weights_version
                    return True
                told = self._changed.wait(LINGER_S)
                if not (told or self._orders or self._batch.has_work or self._pauses) and self._state.open:
                    self._state = State.IDLE
                    return False


_engines: weakref.WeakSet[TransformersEngine] = weakref.WeakSet()
_workers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""All workers, because a worker that outlives its engine still frees tensors."""


@atexit.register
def _end_workers() -> None:
    """Wait until no worker is inside torch, which aborts the process if Python ends meanwhile."""
    for engine in list(_engines):
        engine.shutdown(EXIT_S)
    for worker in list(_workers):
        worker.join(EXIT_S)
