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
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from agentenv.core.errors import EngineError, UsageError
from agentenv.core.images import ImageTokens
from agentenv.core.supports import SupportsBuilder
from agentenv.engine.base import Completion, Features, OnTokens, Sampling
from agentenv.engine.exact import room_for
from agentenv.engine.hf.adapters import base_model
from agentenv.engine.hf.positions import context_limit
from agentenv.engine.hf.request import GenerationRequest
from agentenv.engine.hf.scheduler import Scheduler
from agentenv.engine.hf.threads import dismiss_team
from agentenv.engine.hf.vision import vision_of
from agentenv.engine.stops import Decoder, stop_finder

if TYPE_CHECKING:
    from agentenv.engine.hf.grammar import Grammars, InGrammar
    from agentenv.engine.hf.seeing import Held

__all__ = ["TransformersEngine"]

LINGER_S = 2.0
"""Seconds after which an idle worker thread ends; the next request starts a new one."""
EXIT_S = 10.0
"""Seconds that a process waits at its end for a worker to return from torch."""


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
        max_batch: most requests that decode together; further requests wait.
        kept_bytes: memory for the keys and values of episodes between their turns.
        live_tokens: limit of the tokens of all live requests, or on a GPU of rows times the longest one;
            requests beyond it wait.
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
        max_batch: int = 64,
        kept_bytes: int = 1 << 30,
        live_tokens: int = 1 << 17,
        max_context_tokens: int | None = None,
        adapter: str | None = None,
        seed: int = 0,
        return_routed_experts: bool = False,
    ) -> None:
        if max_batch < 1 or live_tokens < 1 or kept_bytes < 0:
            raise UsageError(
                "max_batch and live_tokens must be at least 1 and kept_bytes at least 0; got "
                f"{max_batch}, {live_tokens} and {kept_bytes}"
            )
        self.name = name
        self.model = model
        self.trained_by: object | None = None
        self._tokenizer = tokenizer
        self.weights_version = 0
        self._tells_experts = return_routed_experts
        self._scheduler = Scheduler(
            model,
            max_batch=max_batch,
            kept_bytes=kept_bytes,
            live_tokens=live_tokens,
            tell_experts=return_routed_experts,
            vision=vision_of(base_model(model), getattr(tokenizer, "images", None)),
        )
        self._sight = self._scheduler.core.sight
        config = self._scheduler.core.config
        self.max_context_tokens: int | None = max_context_tokens or context_limit(config)
        self._vocab_size: int = config.vocab_size
        self._scheduler.check_adapter(adapter)
        self._adapter = adapter
        self._grammars: Grammars | None = None
        """What follows grammars, once a request had one."""
        self._seeds = Random(seed)
        self._changed = threading.Condition()
        self._waiting: deque[GenerationRequest] = deque()
        self._released: list[str] = []
        self._worker: threading.Thread | None = None
        self._busy = False
        self._pauses = 0
        self._stale = False
        self._closed = False

    @property
    def features(self) -> Features:
        """Images are taken if the model sees them and the tokenizer has the rule of its family."""
        return Features(
            images=self._sight is not None, grammars=True, experts=self._tells_experts, stream=self.stream
        )

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
        images: Sequence[ImageTokens] = (),
    ) -> Completion:
        """Sample one completion; see `agentenv.engine.base.Engine`.

        Raises:
            ContextTooLong: The prompt leaves no room for a single token.
            EngineError: The forward pass failed or returned numbers that are not finite.
            UsageError: The prompt is empty, has ids outside the vocabulary, or names an unknown
                adapter; there are stop strings or a grammar and the engine has no tokenizer; or the grammar
                cannot be followed.
        """
        return await self._run(
            self._request(prompt_ids, sampling, stop_token_ids, session_id, deadline_s, images)
        )

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_tokens: OnTokens,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
        images: Sequence[ImageTokens] = (),
    ) -> Completion:
        """Sample one completion and tell each token; see `agentenv.engine.base.Features`."""
        request = self._request(prompt_ids, sampling, stop_token_ids, session_id, deadline_s, images)
        request.on_tokens = on_tokens
        return await self._run(request)

    async def _run(self, request: GenerationRequest) -> Completion:
        with self._changed:
            if self._closed:
                raise EngineError(f"the engine {self.name} is closed", remedy="load the model again")
            self._waiting.append(request)
            if self._worker is None:
                self._start_worker()
            self._changed.notify_all()
        try:
            return await request.future
        finally:
            request.cancelled = True

    async def release(self, session_id: str) -> None:
        """Drop the keys and values of an episode."""
        with self._changed:
            self._released.append(session_id)

    async def close(self) -> None:
        """End the worker and free all keys and values; requests in flight fail."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self, wait_s: float | None = None) -> None:
        """Close the engine outside an event loop; wait at most `wait_s` seconds for the worker."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            worker = self._worker
            if worker is None:  # it ended when it was idle, so nobody else would free what is kept
                self._scheduler.close((), f"the engine {self.name} was closed")
        if worker is not None and worker is not threading.current_thread():
            worker.join(wait_s)

    def weights_updated(self, version: int | None = None) -> int:
        """Tell the engine that the weights of the model changed; return the new version.

        Nothing that was computed with the old weights is used again. If requests may be in flight,
        change the weights inside `updating()`.
        """
        with self._changed:
            self.weights_version = self.weights_version + 1 if version is None else version
            self._stale = True
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
            self._changed.wait_for(lambda: not self._busy)
        try:
            yield
        finally:
            with self._changed:
                # The pause ends even if `version` raises; the worker goes on once the lock is free.
                self._pauses -= 1
                self._stale = True
                self._changed.notify_all()
                self.weights_updated(version() if callable(version) else version)

    def stats(self) -> dict[str, int]:
        """Return counts since the start: tokens prefilled, reused and decoded, passes, images, bytes kept."""
        seen = {} if self._sight is None else {"images": self._sight.passed}
        return {**self._scheduler.stats(), **seen}

    def _request(  # noqa: PLR0917 - the arguments of `generate`
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        session_id: str | None,
        deadline_s: float | None,
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
        held: Sequence[Held] = ()
        if self._sight is not None:
            prompt, held = self._sight.keys(prompt, images)
        elif images:
            raise UsageError(f"{self.name} sees no images", remedy="load a model that sees")
        sampling = replace(sampling, adapter=sampling.adapter_or(self._adapter))
        self._scheduler.check_adapter(sampling.adapter)
        now = time.monotonic()
        loop = asyncio.get_running_loop()
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        return GenerationRequest(
            prompt=prompt,
            sampling=sampling,
            stop=frozenset(stop_token_ids),
            session_id=session_id,
            max_tokens=room,
            deadline=None if deadline_s is None else now + deadline_s,
            random=Random(seed),
            loop=loop,
            future=loop.create_future(),
            created=now,
            vocab_size=self._vocab_size,
            ends_text=self._finder(sampling) if sampling.stop else None,
            supports=SupportsBuilder() if sampling.wants_support else None,
            images=held,
            grammar=self._grammar(sampling.grammar, frozenset(stop_token_ids)) if sampling.grammar else None,
        )

    def _grammar(self, grammar: str, stop: frozenset[int]) -> InGrammar:
        if not stop:
            raise UsageError("a completion that follows a grammar needs stop tokens", remedy="name them")
        if self._grammars is None:
            from agentenv.engine.hf.grammar import Grammars

            if self._tokenizer is None:
                raise UsageError(
                    f"{self.name} cannot sample by a grammar: it has no tokenizer",
                    remedy="load it with load_engine, or pass a tokenizer to TransformersEngine",
                )
            self._grammars = Grammars(self._tokenizer, self._vocab_size, min(stop))
        return self._grammars.begin(grammar, stop)

    def _finder(self, sampling: Sampling) -> Callable[[list[int]], bool]:
        if self._tokenizer is None:
            raise UsageError(
                f"{self.name} cannot find the stop strings {list(sampling.stop)}: it has no tokenizer",
                remedy="load it with load_engine, or pass a tokenizer to TransformersEngine",
            )
        return stop_finder(sampling.stop, self._tokenizer.decode)

    def _start_worker(self) -> None:
        import torch

        # OpenMP stores the number of threads for each calling thread, so the worker must set it to ours.
        threads = torch.get_num_threads()
        dismiss_team()

        def work() -> None:
            torch.set_num_threads(threads)
            self._work()

        self._worker = threading.Thread(target=work, name=f"agentenv-{self.name[:40]}", daemon=True)
        _engines.add(self)
        _workers.add(self._worker)
        self._worker.start()

    def _work(self) -> None:
        scheduler = self._scheduler
        while self._next_orders():
            try:
                scheduler.turn()
            except Exception as error:  # noqa: BLE001 - any failure is passed to the requests
                scheduler.fail(EngineError(f"{self.name} failed: {type(error).__name__}: {error}"), error)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next_orders(self) -> bool:
        """Pass new requests to the scheduler; return False when the worker should end."""
        scheduler = self._scheduler
        with self._changed:
            while True:
                if self._closed:
                    scheduler.close(self._waiting, f"the engine {self.name} was closed")
                    self._worker = None
                    return False
                idle = not (self._waiting or scheduler.has_work)
                if not idle and not self._pauses:
                    break
                if not self._changed.wait(LINGER_S) and idle and not self._waiting and not self._pauses:
                    self._give_orders()  # frees the rows of released episodes even if no request follows
                    self._worker = None
                    return False
            self._busy = True
            self._give_orders()
            return True

    def _give_orders(self) -> None:
        """Pass everything that came in to the scheduler; the caller holds the lock."""
        self._scheduler.take(self._waiting, self._released)
        self._waiting.clear()
        self._released.clear()
        self._scheduler.set_version(self.weights_version, stale=self._stale)
        self._stale = False


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
