"""Continuous batching: requests become rows, rows are prefilled, and all live rows decode together.

Only the engine's worker uses this module. It is not thread-safe, but for `Batch.stats`.

1. A row begins with what was computed for the same tokens before: in its own episode's last turn, or else in
   any row that is live or kept. So the prompt of a group is computed once.
2. Memory is bounded. The live rows take a rectangle of rows times columns, which requests wait for; what is
   kept between turns has a limit of its own, and the oldest goes first.
3. Whatever older weights computed is dropped with them.
4. The rows of a pass that failed are computed again one by one, so that only those that fail by themselves
   are answered with an error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from math import inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentenv.core.errors import EngineError
from agentenv.engine.hf.adapters import AdapterSwitch
from agentenv.engine.hf.passes import Parts, Passes
from agentenv.engine.hf.request import GenerationRequest
from agentenv.engine.hf.sampler import draw
from agentenv.engine.hf.vision import Vision

__all__ = ["Batch", "Room"]

FREE_PADDING = 16
"""Tokens by which a row may be more than twice as long as the shortest row that is padded beside it."""
SHARED_TOKENS = 32
"""Fewest tokens that a row takes over from the row of another episode."""


class Room(NamedTuple):
    """How much an engine computes and keeps at once."""

    max_batch: int = 64
    """Most requests that decode together."""
    kept_bytes: int = 1 << 30
    """Memory for what is kept between turns."""
    live_tokens: int = 1 << 17
    """Limit of the live requests' number times the tokens of the longest one."""
    prefill_tokens: int = 2048
    """Most tokens of one prefill pass, padding included: it bounds its memory and the wait of other rows."""

    @classmethod
    def on_a_card(cls, free_bytes: int, token_bytes: int) -> Room:
        """Return what suits a card with so much free memory beside the model.

        A pass mostly reads the weights, so 256 rows take hardly longer than 64. What is kept gets a tenth of
        the free memory and the live rows a fifth, because a trainer may want the rest.
        """
        prefill = max(2048, min(16_384, free_bytes // (4 << 20)))
        return cls(256, free_bytes // 10, max(1, free_bytes // 5 // max(1, token_bytes)), prefill)


@dataclass(frozen=True, slots=True)
class KeptRow:
    """What was computed for the tokens of an episode, between two of its turns."""

    tokens: list[int]
    parts: Parts

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Joining:
    """Requests with equal contexts, which are about to be prefilled as one row."""

    requests: list[GenerationRequest]
    context: list[int]
    source: KeptRow | int
    """What the row begins with: a kept row, or the number of a live one."""
    reused: int
    """Number of tokens that it takes over from its source."""

    @property
    def new(self) -> list[int]:
        """The tokens to prefill."""
        return self.context[self.reused :]


class Batch:
    """Turns requests into completions; each turn decodes one token of every live request."""

    # Invariant: `_live[r]` owns row `r`, which holds all tokens of the request except the last sampled one,
    # which is the input of the next decoding pass.
    # Invariant: a request is in `_waiting` until its row is computed, so that a failed pass answers each.

    def __init__(
        self,
        model: Any,
        *,
        max_batch: int | None = None,
        kept_bytes: int | None = None,
        live_tokens: int | None = None,
        tell_experts: bool = False,
        vision: Vision | None = None,
    ) -> None:
        self.passes = Passes(model, tell_experts=tell_experts, vision=vision)
        self.rows = self.passes.rows
        self.adapters = AdapterSwitch(model)
        self.version = 0
        """Version of the weights, which each token records."""
        room, device = Room(), model.device
        if device.type == "cuda":
            room = Room.on_a_card(torch.cuda.mem_get_info(device)[0], self.rows.column_bytes)
        given = {"max_batch": max_batch, "kept_bytes": kept_bytes, "live_tokens": live_tokens}
        self._room = room._replace(**{name: one for name, one in given.items() if one is not None})
        self._waiting: list[GenerationRequest] = []
        self._live: list[GenerationRequest] = []
        self._passing: list[list[GenerationRequest]] = []
        """The requests of each row of the present forward pass; empty between passes."""
        self._ended: list[Callable[[], None]] = []
        """Answers of this turn. They are given once the trainer's adapters are back, because whoever gets one
        may use the model at once."""
        self._kept: OrderedDict[tuple[str, str | None], KeptRow] = OrderedDict()
        self.sampled = 0
        """Number of tokens sampled since the start."""
        self._counts = {"prefilled": 0, "reused": 0, "decoded": 0, "prefills": 0, "decodes": 0}

    @property
    def has_work(self) -> bool:
        """True while any request is waiting or live."""
        return bool(self._waiting or self._live)

    @property
    def kept_bytes(self) -> int:
        """Size of what is kept between turns."""
        return sum(kept.nbytes for kept in list(self._kept.values()))

    def stats(self) -> dict[str, int]:
        """Return counts since the start, and what is held now; any thread may call this."""
        seen = {} if self.passes.sight is None else {"images": self.passes.sight.passed}
        held = {"kept_rows": len(self._kept), "kept_bytes": self.kept_bytes, "live_bytes": self.rows.nbytes}
        return {**self._counts, **held, **seen}

    def take(self, request: GenerationRequest) -> None:
        """Let a request wait for its turn."""
        self._waiting.append(request)

    def release(self, session_id: str) -> None:
        """Forget what is kept of an episode."""
        for key in [key for key in self._kept if key[0] == session_id]:
            del self._kept[key]

    def forget(self) -> None:
        """Drop what was computed, because the weights changed; live requests are prefilled again."""
        # They keep their sampled tokens, and come before the requests that never ran.
        self._waiting[:0] = self._live
        self._live.clear()
        self._kept.clear()
        self.rows.clear()
        if self.passes.sight is not None:
            self.passes.sight.forget()

    def turn(self) -> None:
        """Drop requests that are over, let waiting ones join, and decode one token for every live one."""
        self._drop_over()
        admitted = self._admit()
        try:
            with self.adapters.on():
                self._join(admitted)
                if self._live:
                    self._sample(self._decode(), 0)
        finally:
            for answer in self._ended:
                answer()
            self._ended.clear()
        if not self._live:
            # The last request may have run alone beyond the limit, so its room is not kept for the next.
            self.rows.clear()

    def fail(self, error: EngineError) -> None:
        """Answer the only row of a failed pass with an error; let several be computed again, one by one.

        What failed outside a pass is answered to every request.
        """
        rows, self._passing = self._passing, []
        failed = set(chain.from_iterable(rows)) if rows else {*self._live, *self._waiting}
        self.forget()  # the pass may have ended while the rows changed
        if len(rows) > 1:
            for request in failed:
                request.set_apart()
            return
        self._waiting = [request for request in self._waiting if request not in failed]
        for request in failed:
            request.fail(error)

    def _drop_over(self) -> None:
        # Go from the last row down: a row that leaves is replaced by the last row, which was checked before.
        for row in reversed(range(len(self._live))):
            request = self._live[row]
            if request.over:
                # The episode of a cancelled request may be released already, so nobody would free its row.
                self._leave(row, keep=not request.cancelled)
                request.finish("abort")
        for request in [request for request in self._waiting if request.over]:
            self._waiting.remove(request)
            request.finish("abort")

    def _admit(self) -> list[GenerationRequest]:
        """Return the first waiting requests that fit and have the current adapter; none is overtaken."""
        # A forward pass uses one adapter for all rows, so the adapter changes only when no row is live.
        if self._waiting and not self._live:
            self.adapters.current = self._waiting[0].sampling.adapter
        admitted: list[GenerationRequest] = []
        widest = max((request.longest for request in self._live), default=0)
        for request in islice(self._waiting, self._room.max_batch - len(self._live)):
            rows, wider = len(self._live) + len(admitted) + 1, max(widest, request.longest)
            # Alone, a request may exceed the limit.
            fits = rows * wider <= self._room.live_tokens or rows == 1
            if not fits or request.sampling.adapter != self.adapters.current:
                break
            admitted.append(request)
            widest = wider
        self.rows.limit = max(self._room.live_tokens, widest)
        return admitted

    def _join(self, requests: list[GenerationRequest]) -> None:
        """Prefill requests, and sample the first token of each."""
        first, logits = len(self._live), list[Tensor]()
        while requests:
            joining, requests = self._begin(requests)
            logits += [self._prefill(group) for group in self._groups(joining)]
        if logits:
            self._sample(torch.cat(logits), first)

    def _begin(self, requests: list[GenerationRequest]) -> tuple[list[Joining], list[GenerationRequest]]:
        """Return which rows to prefill now, and the requests that can begin with one of these afterwards."""
        now: dict[tuple[int, ...], Joining] = {}
        later: list[GenerationRequest] = []
        for request in requests:
            context = request.context
            if (equal := now.get(tuple(context))) is not None:
                equal.requests.append(request)
                continue
            source, reused = self._source(request, context)
            enough = reused + SHARED_TOKENS
            if any(common_prefix(other.context, context) >= enough for other in now.values()):
                later.append(request)
            else:
                now[tuple(context)] = Joining([request], context, source, reused)
        return list(now.values()), later

    def _source(self, request: GenerationRequest, context: list[int]) -> tuple[KeptRow | int, int]:
        """Return the row that a context begins with, and the number of tokens to take over from it."""
        own = None if request.key is None else self._kept.get(request.key)
        rows: list[tuple[KeptRow | int, list[int]]] = [] if own is None else [(own, own.tokens)]
        if own is None:
            rows += ((row, live.prompt) for row, live in enumerate(self._live))
            rows += ((row, row.tokens) for key, row in self._kept.items() if key[1] == self.adapters.current)
        best: KeptRow | int = 0
        most, least = 0, SHARED_TOKENS if own is None else 1
        for row, tokens in rows:
            # The last token is always computed, because its logits are wanted.
            shared = min(common_prefix(tokens, context), len(context) - 1)
            if self.passes.sight is not None:
                shared = self.passes.sight.whole(context, shared)
            if shared >= least:
                best, most, least = row, shared, shared + 1
        return best, most

    def _groups(self, joining: list[Joining]) -> list[list[Joining]]:
        """Group rows for prefill passes of bounded size, in which little is padded."""
        groups: list[list[Joining]] = []
        for one in sorted(joining, key=lambda one: len(one.new)):
            count = len(one.new)
            if groups and not (passes_alone(one) or passes_alone(groups[-1][0])):
                padded = count > 2 * len(groups[-1][0].new) + FREE_PADDING
                if not padded and count * (len(groups[-1]) + 1) <= self._room.prefill_tokens:
                    groups[-1].append(one)
                    continue
            groups.append([one])
        return groups

    def _prefill(self, group: list[Joining]) -> Tensor:
        """Make live rows of a group; return the logits after each, in their order."""
        first, sight = len(self._live), self.passes.sight
        self._passing = [one.requests for one in group]
        for one in group:
            source, shift = one.source, 0 if sight is None else sight.shift(one.context[: one.reused])
            parts = source.parts if isinstance(source, KeptRow) else self.rows.view(source, one.reused)
            self.rows.add(parts, one.reused, shift)
            self._counts["reused"] += one.reused
            self._counts["prefilled"] += len(one.new)
        for request in chain.from_iterable(self._passing):
            request.start()
            if request.key is not None:
                self._kept.pop(request.key, None)  # it is in the row now
        logits = self.passes.prefill(first, [one.new for one in group], self._room.prefill_tokens)
        self._counts["prefills"] += 1
        joined, order = [one.requests[0] for one in group], list(range(len(group)))
        for index, one in enumerate(group):
            for request in one.requests[1:]:
                row = first + index
                self.rows.add(self.rows.view(row, len(one.context)), len(one.context), self.rows.shifts[row])
                joined.append(request)
                order.append(index)
        self._live += joined
        self._waiting = [request for request in self._waiting if request not in joined]
        self._passing = []
        return logits[order]

    def _decode(self) -> Tensor:
        """Compute the next token of every live row; return the logits of each."""
        self._counts["decodes"] += 1
        self._counts["decoded"] += len(self._live)
        apart = any(request.apart for request in self._live)
        logits: list[Tensor] = []
        for first, live in enumerate([[one] for one in self._live] if apart else [self._live]):
            self._passing = [[request] for request in live]
            logits.append(self.passes.run(first, [request.tokens[-1:] for request in live]))
        self._passing = []
        for request in self._live if apart else ():
            request.apart = max(0, request.apart - 1)
        return torch.cat(logits)

    def _sample(self, logits: Tensor, first: int) -> None:
        """Give each live request from `first` on its next token."""
        requests = self._live[first:]
        allowed = {
            row: request.grammar.mask() for row, request in enumerate(requests) if request.grammar is not None
        }
        if self.passes.sight is not None:
            logits[:, list(self.passes.sight.vision.banned_ids)] = -inf
        uniforms = [request.uniform() for request in requests]
        samplings = [request.sampling for request in requests]
        tokens, logprobs, supports = draw(logits, samplings, uniforms, allowed)
        self.sampled += len(tokens)
        # Go from the last row down, because a row that leaves is replaced by the last one.
        for index, request in reversed(list(enumerate(requests))):
            if not isfinite(logprobs[index]):
                self._leave(first + index, keep=False)
                problem = "" if request.grammar is None else request.grammar.problem
                error = EngineError(
                    problem or f"the model returned a log-probability of {logprobs[index]}",
                    remedy="" if problem else "check that its weights are finite",
                )
                self._ended.append(partial(request.fail, error))
                continue
            if request.supports is not None:
                request.supports.append(supports[index])
            reason = request.add(tokens[index], logprobs[index], self.version)
            if reason is not None:
                request.routed_experts = self.passes.routed_experts(first + index)
                self._leave(first + index)
                self._ended.append(partial(request.finish, reason))

    def _leave(self, row: int, *, keep: bool = True) -> None:
        """Remove a request from the batch, and keep what was computed for the next turn of its episode."""
        key = self._live[row].key
        if keep and key is not None:
            self._keep(key, row)
        self.rows.remove(row)
        self._live[row] = self._live[-1]
        self._live.pop()

    def _keep(self, key: tuple[str, str | None], row: int) -> None:
        length = self.rows.lengths[row]
        room = self._room.kept_bytes - length * self.rows.column_bytes
        if room < 0:
            return
        while self._kept and self.kept_bytes > room:
            self._kept.popitem(last=False)
        parts = [part.clone() for part in self.rows.view(row, length)]
        self._kept[key] = KeptRow(self._live[row].context[:length], parts)


def passes_alone(one: Joining) -> bool:
    """Return whether a row is prefilled in a pass of its own: one apart, or with images (keys below 0)."""
    return min(one.new) < 0 or any(request.apart for request in one.requests)


def common_prefix(left: list[int], right: list[int]) -> int:
    """Return how many leading tokens two lists share."""
    low, high = 0, min(len(left), len(right))
    if left[:SHARED_TOKENS] != right[:SHARED_TOKENS]:
        high = min(high, SHARED_TOKENS)  # most lists differ early
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
