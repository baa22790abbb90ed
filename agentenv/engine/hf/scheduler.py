"""The part of the engine that runs in the worker: it schedules requests and keeps keys and values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from typing import Any

import torch

from agentenv.core.errors import EngineError
from agentenv.engine.hf.adapters import AdapterSwitch
from agentenv.engine.hf.buffers import SavedRow
from agentenv.engine.hf.core import ForwardCore
from agentenv.engine.hf.kept import Beginnings, KeptRow, KeptRows, common_prefix
from agentenv.engine.hf.request import GenerationRequest
from agentenv.engine.hf.sampler import draw
from agentenv.engine.hf.vision import Vision

__all__ = ["Scheduler"]

SHARED_TOKENS = 32
"""Prompts that share at least this many leading tokens have them computed only once."""


@dataclass(frozen=True, slots=True)
class Joining:
    """A request about to be prefilled."""

    request: GenerationRequest
    context: list[int]
    kept: KeptRow | None
    reused: int
    """Number of leading tokens whose keys and values are already kept."""

    @classmethod
    def of(cls, request: GenerationRequest, kept: KeptRow | None) -> Joining:
        """Find out how much of the context is kept; its last token is always computed."""
        context = request.context
        reused = 0 if kept is None else min(common_prefix(kept.tokens, context), len(context) - 1)
        return cls(request, context, kept, reused)

    @property
    def new(self) -> list[int]:
        """The tokens to prefill."""
        return self.context[self.reused :]


UNWRITTEN = 16
"""How many times larger than what is written buffers may be, where only that takes memory."""


class Scheduler:
    """Turns requests into completions; each turn decodes one token of every live request."""

    # Invariant: `_live[r]` owns row `r` of the core's buffers, which holds all tokens of the request except
    # the last sampled one, which is the input of the next decoding pass.
    # Invariant: the rows in `_kept` and the beginnings have at most `_kept_limit` bytes together.

    def __init__(
        self,
        model: Any,
        *,
        max_batch: int,
        kept_bytes: int,
        live_tokens: int,
        tell_experts: bool = False,
        vision: Vision | None = None,
    ) -> None:
        self.core = ForwardCore(model, tell_experts=tell_experts, vision=vision)
        self._adapters = AdapterSwitch(model)
        self._max_batch = max_batch
        self._kept_limit = kept_bytes
        self._live_tokens = live_tokens
        self._waiting: deque[GenerationRequest] = deque()
        self._live: list[GenerationRequest] = []
        self._prefilling: list[GenerationRequest] = []
        """The requests that the present forward pass is for alone; empty while all live ones decode."""
        self._ended: list[Callable[[], None]] = []
        """Answers of this turn. They are given once the trainer's adapters are back, because whoever gets one
        may use the model at once."""
        self._kept = KeptRows()
        self._beginnings = Beginnings(kept_bytes // 4)
        self._version = 0
        self._counts = {"prefilled": 0, "reused": 0, "decoded": 0, "prefills": 0, "decodes": 0}

    @property
    def has_work(self) -> bool:
        """True while any request is waiting or live."""
        return bool(self._waiting or self._live)

    def check_adapter(self, name: str | None) -> None:
        """Raise UsageError if the model has no such adapter."""
        self._adapters.check(name)

    def stats(self) -> dict[str, int]:
        """Return counts since the start."""
        return {
            **self._counts,
            "kept_rows": len(self._kept),
            "kept_bytes": self._kept.nbytes + self._beginnings.nbytes,
            "live_bytes": self.core.buffers.nbytes,
        }

    def take(self, requests: Sequence[GenerationRequest], released: Sequence[str]) -> None:
        """Take new requests and forget released episodes."""
        self._waiting.extend(requests)
        if released:
            gone = set(released)
            for key in [key for key in self._kept if key[0] in gone]:
                self._kept.take(key)

    def set_version(self, version: int, *, stale: bool) -> None:
        """Set the version of the weights; with `stale`, drop everything that older weights computed."""
        self._version = version
        if not stale:
            return
        # Keys and values of old weights must not be combined with tokens of new ones. Live requests keep
        # their sampled tokens, and are prefilled again before the requests that never ran.
        self._drop_computed()
        self.core.products.forget()
        self._waiting.extendleft(reversed(self._live))
        self._live.clear()

    def turn(self) -> None:
        """Drop ended requests, let waiting ones join, and decode one token for every live request."""
        self._drop_ended()
        joining = self._admit()
        pending = [entry.request for entry in joining]
        try:
            with self._adapters.on():
                self._share_beginnings(joining)
                groups = self._groups(joining)
                joining.clear()  # `_prefill` frees the kept rows group by group
                for group in groups:
                    joined = {entry.request for entry in group}
                    self._prefill(group)
                    pending = [request for request in pending if request not in joined]
                if self._live:
                    self._decode()
        except Exception:
            # Requests that were about to join are in neither list yet, but must be answered too.
            self._waiting.extendleft(request for request in reversed(pending) if request not in self._live)
            raise
        finally:
            for answer in self._ended:
                answer()
            self._ended.clear()
        if not self._live:
            # The last request may have run alone beyond the limit, so its buffers are not kept for the next.
            self.core.buffers.clear()

    def fail(self, error: EngineError, cause: BaseException) -> None:
        """Answer the requests of a failed pass with an error; all others are prefilled again.

        If the pass was not a prefill of some requests alone, every request is answered with the error.
        """
        error.__cause__ = cause
        requests = [*self._live, *self._waiting]
        failed = set(self._prefilling or requests)
        for request in failed:
            request.fail(error)
        self._waiting = deque(request for request in requests if request not in failed)
        self._live.clear()
        self._prefilling = []
        # Nothing that was computed is kept, because the pass may have ended while the buffers changed.
        self._drop_computed()

    def close(self, requests: Sequence[GenerationRequest], reason: str) -> None:
        """Fail all remaining requests and free the memory."""
        self._waiting.extend(requests)
        self._prefilling = []
        self.fail(EngineError(reason), EngineError(reason))
        self.core.products.forget()

    def _drop_computed(self) -> None:
        self._kept.clear()
        self._beginnings.clear()
        self.core.buffers.clear()
        if self.core.sight is not None:
            self.core.sight.forget()

    def _drop_ended(self) -> None:
        # Go from the last row down: a row that leaves is replaced by the last row, which was checked before.
        for row in reversed(range(len(self._live))):
            request = self._live[row]
            if request.cancelled or request.expired:
                # The episode of a cancelled request may be released already, so nobody would free its row.
                self._leave(row, keep=not request.cancelled)
                request.finish("abort")
        still: deque[GenerationRequest] = deque()
        for request in self._waiting:
            if request.cancelled or request.expired:
                request.finish("abort")
            else:
                still.append(request)
        self._waiting = still

    def _admit(self) -> list[Joining]:
        """Take requests from the queue in order, while they fit and have the current adapter."""
        joining: list[Joining] = []
        # A forward pass uses one adapter for all rows, so the adapter changes only when no row is live.
        if self._waiting and not self._live:
            self._adapters.current = self._waiting[0].sampling.adapter
        lengths = [len(request.prompt) + request.max_tokens for request in self._live]
        widest, tokens = max(lengths, default=0), sum(lengths)
        while self._waiting and len(self._live) + len(joining) < self._max_batch:
            request = self._waiting[0]
            if request.sampling.adapter != self._adapters.current:
                break  # no later request may overtake this one, which might otherwise wait for ever
            length = len(request.prompt) + request.max_tokens
            rows = len(self._live) + len(joining) + 1
            if rows > 1 and not self._fits(tokens + length, rows * max(widest, length)):
                break  # only a request that would run alone may exceed the limit
            widest, tokens = max(widest, length), tokens + length
            self._waiting.popleft()
            joining.append(self._join(request))
        self.core.buffers.limit = max(self._live_cells, widest)
        return joining

    def _fits(self, tokens: int, cells: int) -> bool:
        """Return whether rows of so many tokens fit, in buffers of so many rows times columns."""
        return tokens <= self._live_tokens and cells <= self._live_cells

    @property
    def _live_cells(self) -> int:
        """Most rows times columns of the buffers, which are as wide as the widest row."""
        return self._live_tokens * (UNWRITTEN if self.core.buffers.by_tokens else 1)

    def _join(self, request: GenerationRequest) -> Joining:
        key = request.key
        kept = None if key is None else self._kept.take(key)
        return Joining.of(request, kept or self._beginnings.find(self._adapters.current, request.context))

    def _share_beginnings(self, joining: list[Joining]) -> None:
        """Compute the common beginning of several new prompts once, and let all of them start from it."""
        fresh = [index for index, entry in enumerate(joining) if entry.kept is None]
        while fresh:
            first = joining[fresh[0]].context
            shared = {index: common_prefix(first, joining[index].context) for index in fresh}
            alike = {index: length for index, length in shared.items() if length >= SHARED_TOKENS}
            fresh = [index for index in fresh[1:] if index not in alike]
            length = min(alike.values(), default=0)
            # Equal contexts, such as the members of a group, are copied after one prefill anyway.
            if length < SHARED_TOKENS or all(joining[index].context == first for index in alike):
                continue
            self._prefilling = [joining[index].request for index in alike]
            beginning = self._beginning(first[:length])
            self._prefilling = []
            for index in alike:
                joining[index] = Joining.of(joining[index].request, beginning)

    def _beginning(self, tokens: list[int]) -> KeptRow:
        # The row is temporary: it is never decoded, and must be removed before rows of requests are added.
        row = self.core.live
        self.core.prefill([(None, 0, tokens)])
        beginning = KeptRow(tokens, self.core.buffers.share(row))
        self.core.buffers.remove(row)
        self._counts["prefilled"] += len(tokens)
        self._counts["prefills"] += 1
        self._beginnings.keep(self._adapters.current, beginning)
        self._make_room(0)
        return beginning

    def _groups(self, joining: list[Joining]) -> list[list[Joining]]:
        """Group requests for prefill passes of bounded size, in which little is padded."""
        alike: dict[tuple[int, ...], list[Joining]] = {}
        for entry in sorted(joining, key=lambda entry: len(entry.new)):
            alike.setdefault(tuple(entry.context), []).append(entry)
        groups: list[list[Joining]] = []
        counts: list[int] = []
        for entries in alike.values():
            counts.append(len(entries[0].new))  # equal contexts are computed once
            if groups and self.core.fit_together(counts):
                groups[-1] += entries
            else:
                groups.append(entries)
                counts = counts[-1:]
        return groups

    def _prefill(self, group: list[Joining]) -> None:
        """Let a group of requests join, and sample the first token of each."""
        first = len(self._live)
        self._prefilling = [entry.request for entry in group]
        logits = self._compute(group)
        group.clear()  # what was kept of these episodes is in the buffers now, so it must not be held twice
        self._sample(logits, first)
        self._prefilling = []

    def _compute(self, group: list[Joining]) -> torch.Tensor:
        """Compute the new tokens of a group; equal contexts are computed once and copied."""
        leaders: dict[tuple[int, ...], int] = {}
        entries: list[tuple[SavedRow | None, int, Sequence[int]]] = []
        followers: list[tuple[GenerationRequest, int]] = []
        first = len(self._live)
        for entry in group:
            content = tuple(entry.context)
            if content in leaders:
                followers.append((entry.request, leaders[content]))
                continue
            leaders[content] = len(entries)
            saved = None if entry.kept is None else entry.kept.row
            entries.append((saved, entry.reused, entry.new))
            self._start(entry.request)
            self._counts["reused"] += entry.reused
            self._counts["prefilled"] += len(entry.new)
        self._counts["prefills"] += 1
        logits = self.core.prefill(entries)
        # Copies come after all leaders, in the order of `_live`, so that rows and requests stay paired.
        for request, leader in followers:
            self.core.buffers.duplicate(first + leader)
            self._start(request)
        if followers:
            order = [*range(len(entries)), *(leader for _, leader in followers)]
            logits = logits[torch.tensor(order, device=logits.device)]
        return logits

    def _start(self, request: GenerationRequest) -> None:
        request.start()
        self._live.append(request)

    def _decode(self) -> None:
        self._counts["decodes"] += 1
        self._counts["decoded"] += len(self._live)
        self.core.products.expect(max(request.left for request in self._live))
        self._sample(self.core.decode([request.tokens[-1] for request in self._live]), 0)

    def _sample(self, logits: torch.Tensor, first: int) -> None:
        requests = self._live[first:]
        samplings = [request.sampling for request in requests]
        uniforms = [request.uniform() for request in requests]
        masks = {
            row: request.grammar.mask() for row, request in enumerate(requests) if request.grammar is not None
        }
        if self.core.sight is not None:
            logits[:, list(self.core.sight.vision.banned_ids)] = -inf
        tokens, logprobs, supports = draw(logits, samplings, uniforms, masks)
        # Go from the last row down, because a row that leaves is replaced by the last one.
        for row in reversed(range(first, len(self._live))):
            request, logprob = self._live[row], logprobs[row - first]
            if not isfinite(logprob):
                self._leave(row, keep=False)
                problem = "" if request.grammar is None else request.grammar.problem
                error = EngineError(
                    problem or f"the model returned a log-probability of {logprob}",
                    remedy="" if problem else "check that its weights are finite",
                )
                self._ended.append(partial(request.fail, error))
                continue
            if request.supports is not None:
                request.supports.append(supports[row - first])
            reason = request.add(tokens[row - first], logprob, self._version)
            if reason is not None:
                request.routed_experts = self.core.routed_experts(row)
                self._leave(row)
                self._ended.append(partial(request.finish, reason))

    def _leave(self, row: int, *, keep: bool = True) -> None:
        """Remove a request from the batch, and keep its keys and values for the next turn of the episode."""
        request = self._live[row]
        key = request.key
        if keep and key is not None:
            self._keep(key, row)
        self.core.buffers.remove(row)
        self._live[row] = self._live[-1]
        self._live.pop()

    def _keep(self, key: tuple[str, str | None], row: int) -> None:
        self._kept.take(key)
        if self._make_room(self.core.buffers.size_of(row)):
            saved = self.core.buffers.save(row)
            self._kept.keep(key, KeptRow(self._live[row].context[: saved.length], saved))

    def _make_room(self, size: int) -> bool:
        """Drop the oldest kept rows until `size` bytes are free; return False if they never can be."""
        room = self._kept_limit - self._beginnings.nbytes
        if size > room:
            return False
        while self._kept.nbytes + size > room:
            self._kept.take(next(iter(self._kept)))
        return True
