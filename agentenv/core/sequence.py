"""Tokens by source, with every aligned view derived from them.

Invariants, held by construction and tried by `tests/property/test_trajectory.py`:

1. A span has logprobs exactly when the policy sampled it, one finite number per token.
2. `token_ids`, `loss_mask`, `logprobs` and `turn_index` of a sequence have one length.
3. `loss_mask[i]` is true exactly on tokens that the policy sampled; elsewhere the logprob is 0.0.
4. A cut is a prefix of every view. Appending never changes what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from math import isfinite
from typing import Literal, TypeAlias, TypeVar, cast

from agentenv.core.errors import AlignmentError

__all__ = ["SequenceBuilder", "Source", "TokenSequence", "TokenSpan"]

Source: TypeAlias = Literal["prompt", "model", "env", "other"]
"""Who wrote a token; `other` is another model than the policy, never trained."""

_SOURCES = frozenset({"prompt", "model", "env", "other"})
_T = TypeVar("_T")

MAX_LOGPROB = 1e-3
"""Largest logprob taken as rounding of 0; anything above is not a probability."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A run of tokens from one source, in one turn.

    Raises:
        AlignmentError: Logprobs and tokens disagree, a logprob is not a log-probability, or a token id
            is negative.
    """

    source: Source
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    """Natural log, at the sampling temperature; present exactly when the source is the model."""
    weights_version: int | None = None
    """Weights that sampled the span; only for the model's."""
    turn: int = -1
    """Index of the assistant turn that the span belongs to; -1 for the first prompt."""

    def __post_init__(self) -> None:
        if self.source not in _SOURCES:
            raise AlignmentError(f"unknown token source {self.source!r}", remedy=f"one of {sorted(_SOURCES)}")
        if min(self.token_ids, default=0) < 0:
            raise AlignmentError(f"token id {min(self.token_ids)} of a {self.source} span is negative")
        if self.source != "model":
            if self.logprobs is not None:
                raise AlignmentError(f"a {self.source} span must not have logprobs")
            return
        if self.logprobs is None:
            raise AlignmentError("a model span needs the engine's logprobs, one for each token")
        if len(self.logprobs) != len(self.token_ids):
            raise AlignmentError(f"{len(self.token_ids)} sampled tokens but {len(self.logprobs)} logprobs")
        if _all_logprobs(self.logprobs):
            return
        for index, logprob in enumerate(cast("tuple[object, ...]", self.logprobs)):
            if not isinstance(logprob, (int, float)) or not isfinite(logprob) or logprob > MAX_LOGPROB:
                raise AlignmentError(f"logprob {logprob!r} of sampled token {index} is not ln(p) <= 0")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def trained(self) -> bool:
        """True if the loss covers these tokens."""
        return self.source == "model"


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Spans in order; the aligned views of length `len(sequence)` are derived from them."""

    spans: tuple[TokenSpan, ...]

    def __len__(self) -> int:
        return sum(map(len, self.spans))

    @property
    def token_ids(self) -> list[int]:
        """Every token id, in order."""
        return list(chain.from_iterable(span.token_ids for span in self.spans))

    @property
    def loss_mask(self) -> list[bool]:
        """True exactly on tokens that the policy sampled."""
        return self._spread(lambda span: repeat(span.trained, len(span)))

    @property
    def logprobs(self) -> list[float]:
        """The sampler's logprob of each token; 0.0 outside the loss mask."""
        return self._spread(lambda span: span.logprobs or repeat(0.0, len(span)))

    @property
    def turn_index(self) -> list[int]:
        """The assistant turn of each token; -1 in the first prompt."""
        return self._spread(lambda span: repeat(span.turn, len(span)))

    @property
    def num_trained_tokens(self) -> int:
        """Number of tokens under the loss mask."""
        return sum(len(span) for span in self.spans if span.trained)

    def cut(self, length: int) -> TokenSequence:
        """Return the first `length` tokens; a prefix in every view.

        Raises:
            ValueError: `length` is negative.
        """
        if length < 0:
            raise ValueError(f"cannot cut a sequence to {length} tokens")
        kept: list[TokenSpan] = []
        for span in self.spans:
            if length <= 0:
                break
            kept.append(span if len(span) <= length else _cut_span(span, length))
            length -= len(span)
        return TokenSequence(tuple(kept))

    def _spread(self, view: Callable[[TokenSpan], Iterator[_T] | Sequence[_T]]) -> list[_T]:
        return list(chain.from_iterable(map(view, self.spans)))


def _all_logprobs(values: tuple[float, ...]) -> bool:
    """Say at the speed of C that all is well; what is not is then looked for one by one."""
    return set(map(type, values)) <= {float} and all(map(isfinite, values)) and max(values, default=0.0) <= 0


def _cut_span(span: TokenSpan, length: int) -> TokenSpan:
    logprobs = None if span.logprobs is None else span.logprobs[:length]
    return TokenSpan(span.source, span.token_ids[:length], logprobs, span.weights_version, span.turn)


class SequenceBuilder:
    """Grow a sequence by appending; a turn costs the length of what is new.

    `token_ids` is the flat list that the engine gets as its prompt: it is read, never written,
    by others. Empty appends leave no span.
    """

    __slots__ = ("_spans", "token_ids")

    def __init__(self) -> None:
        self._spans: list[TokenSpan] = []
        self.token_ids: list[int] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_spans(self) -> int:
        """Spans so far."""
        return len(self._spans)

    def append(
        self,
        source: Source,
        token_ids: Sequence[int],
        *,
        logprobs: Sequence[float] | None = None,
        weights_version: int | None = None,
        turn: int = -1,
    ) -> None:
        """Append one span.

        Raises:
            AlignmentError: The span breaks an invariant; nothing is appended then.
        """
        flat = None if logprobs is None else tuple(logprobs)
        span = TokenSpan(source, tuple(token_ids), flat, weights_version, turn)
        if span.token_ids:
            self._spans.append(span)
            self.token_ids.extend(span.token_ids)

    def append_completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        version_ranges: Sequence[tuple[int, int, int]],
        *,
        turn: int,
    ) -> None:
        """Append a completion; where it crosses a weight update it becomes adjacent spans.

        Args:
            token_ids: the sampled ids.
            logprobs: one for each id.
            version_ranges: `(weights_version, start, end)`, covering the ids in order.
            turn: index of the assistant turn.

        Raises:
            AlignmentError: Lengths disagree, or the ranges do not cover the ids.
        """
        if logprobs is None or len(logprobs) != len(token_ids):
            count = "no" if logprobs is None else str(len(logprobs))
            raise AlignmentError(f"turn {turn}: {len(token_ids)} sampled tokens but {count} logprobs")
        starts = [start for _, start, _ in version_ranges]
        ends = [end for _, _, end in version_ranges]
        if token_ids and (
            [*starts, len(token_ids)] != [0, *ends] or any(a >= b for a, b in zip(starts, ends, strict=True))
        ):
            raise AlignmentError(
                f"turn {turn}: weight versions {list(version_ranges)} do not cover {len(token_ids)} tokens"
            )
        spans = [
            TokenSpan("model", tuple(token_ids[start:end]), tuple(logprobs[start:end]), version, turn)
            for version, start, end in version_ranges
        ]
        for span in spans:
            if span.token_ids:
                self._spans.append(span)
                self.token_ids.extend(span.token_ids)

    def freeze(self) -> TokenSequence:
        """Return the immutable sequence of what was appended so far."""
        return TokenSequence(tuple(self._spans))
