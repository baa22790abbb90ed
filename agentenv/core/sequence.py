"""Token sequences: spans of tokens with their source, from which ids, loss mask and logprobs are derived.

The types keep these invariants, and `tests/property/test_trajectory.py` tests them:

1. A span has logprobs exactly if the policy sampled it; then each token has one finite logprob.
2. `token_ids`, `loss_mask`, `logprobs` and `turn_index` of a sequence have the same length.
3. `loss_mask[i]` is true exactly for tokens that the policy sampled; other tokens have the logprob 0.0.
4. Cutting a sequence keeps a prefix of each of them. Appending never changes earlier tokens.
5. Images are in prompts and in what environments say: whole, in order and apart. A cut through an image ends
   before it. `keys` are equal up to a token only if the ids and the images up to there are.
6. A model span has supports if its tokens were sampled from a cut distribution that was kept: then each token
   has one, and is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from math import isfinite
from typing import Literal, TypeAlias, TypeVar, cast

from agentenv.core.errors import AlignmentError
from agentenv.core.images import ImageTokens, check_images, images_between, keys_of
from agentenv.core.routed_experts import RoutedExperts
from agentenv.core.supports import Supports
from agentenv.core.visible import one_line

__all__ = ["Prompt", "SequenceBuilder", "Source", "TokenSequence", "TokenSpan", "images_of"]

Source: TypeAlias = Literal["prompt", "model", "env", "other"]
"""Who wrote a token. `other` is a model that is not the policy; its tokens are never trained on."""

_SOURCES = frozenset({"prompt", "model", "env", "other"})
_SHOWN = frozenset({"prompt", "env"})
"""Sources whose spans may have images."""
_T = TypeVar("_T")

MAX_LOGPROB = 1e-3
"""Largest logprob that is accepted as a rounding of 0; a larger one is not the log of a probability."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens from one source in one turn.

    Raises:
        AlignmentError: Logprobs and tokens disagree, a logprob is not a log-probability, or a token id
            is negative.
    """

    source: Source
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    """Natural logarithms of the probabilities at the sampling temperature; None unless the source is
    `model`."""
    weights_version: int | None = None
    """Version of the weights that sampled the span; None unless the source is `model`."""
    turn: int = -1
    """Index of the assistant turn that the span belongs to; -1 for the first prompt."""
    supports: Supports | None = None
    """The tokens that each token was sampled from; None if from all, or if they were not kept."""
    images: tuple[ImageTokens, ...] = ()
    """The images among the tokens, by their places in the span."""

    def __post_init__(self) -> None:
        if self.images:
            _check_shown(self)
        _check_ids(self)
        if self.source != "model":
            for name in ("logprobs", "supports"):
                if getattr(self, name) is not None:
                    raise AlignmentError(f"a {self.source} span must not have {name}")
            return
        if self.logprobs is None:
            raise AlignmentError("a model span needs the engine's logprobs, one for each token")
        if len(self.logprobs) != len(self.token_ids):
            raise AlignmentError(f"{len(self.token_ids)} sampled tokens but {len(self.logprobs)} logprobs")
        if self.supports is not None:
            self.supports.require(self.token_ids)
        if _all_logprobs(self.logprobs):
            return
        for index, logprob in enumerate(cast("tuple[object, ...]", self.logprobs)):
            if not isinstance(logprob, (int, float)) or not isfinite(logprob) or logprob > MAX_LOGPROB:
                raise AlignmentError(f"logprob {logprob!r} of sampled token {index} is not ln(p) <= 0")

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return one_line(self, self.source, f"{len(self)} tokens", f"turn {self.turn}")

    @property
    def trained(self) -> bool:
        """True if the loss covers these tokens."""
        return self.source == "model"


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Spans in order; token ids, loss mask, logprobs and turn indices are all derived from them."""

    spans: tuple[TokenSpan, ...]
    routed_experts: RoutedExperts | None = None
    """Experts that the engine chose for the first tokens, usually for all but the last; None if it told
    none. Each token has the choices of the first request that saw it; see `SequenceBuilder.route`."""

    def __len__(self) -> int:
        return sum(map(len, self.spans))

    def __repr__(self) -> str:
        sampled = f"{self.num_trained_tokens} of them trained"
        return one_line(self, f"{len(self)} tokens", sampled, f"{len(self.spans)} spans")

    @property
    def token_ids(self) -> list[int]:
        """All token ids, in order."""
        return list(chain.from_iterable(span.token_ids for span in self.spans))

    @property
    def images(self) -> tuple[ImageTokens, ...]:
        """All images, by their places in the sequence."""
        images: list[ImageTokens] = []
        start = 0
        for span in self.spans:
            images += [image.moved(start) for image in span.images]
            start += len(span)
        return tuple(images)

    @property
    def keys(self) -> list[int]:
        """What to compare with other sequences: token ids, and numbers of their own for tokens of images."""
        return keys_of(self.token_ids, self.images)

    @property
    def loss_mask(self) -> list[bool]:
        """True exactly for tokens that the policy sampled."""
        return self._spread(lambda span: repeat(span.trained, len(span)))

    @property
    def logprobs(self) -> list[float]:
        """The sampler's logprob of each token; 0.0 for tokens outside the loss mask."""
        return self._spread(lambda span: span.logprobs or repeat(0.0, len(span)))

    @property
    def turn_index(self) -> list[int]:
        """Index of the assistant turn of each token; -1 for the first prompt."""
        return self._spread(lambda span: repeat(span.turn, len(span)))

    @property
    def num_trained_tokens(self) -> int:
        """Number of tokens under the loss mask."""
        return sum(len(span) for span in self.spans if span.trained)

    def cut(self, length: int) -> TokenSequence:
        """Return the sequence of the first `length` tokens; of fewer, if an image would be cut in two.

        Raises:
            ValueError: `length` is negative.
        """
        if length < 0:
            raise ValueError(f"cannot cut a sequence to {length} tokens")
        length = min((one.offset for one in self.images if one.offset < length < one.end), default=length)
        kept: list[TokenSpan] = []
        for span in self.spans:
            if length <= 0:
                break
            kept.append(span if len(span) <= length else _cut_span(span, length))
            length -= len(span)
        sequence = TokenSequence(tuple(kept))
        routed = self.routed_experts
        return sequence if routed is None else replace(sequence, routed_experts=routed.part(0, len(sequence)))

    def supports_of(self, start: int, end: int) -> Supports | None:
        """Return the supports of the tokens from `start` to before `end`; None if one of them has none."""
        parts: list[Supports] = []
        first = 0
        for span in self.spans:
            last = first + len(span)
            if first < end and start < last:
                if span.supports is None:
                    return None
                parts.append(span.supports.cut(max(start - first, 0), min(end, last) - first))
            first = last
        return Supports.joined(parts)

    def _spread(self, view: Callable[[TokenSpan], Iterator[_T] | Sequence[_T]]) -> list[_T]:
        return list(chain.from_iterable(map(view, self.spans)))


def _check_ids(span: TokenSpan) -> None:
    """Check the source of a span and its token ids."""
    if span.source not in _SOURCES:
        raise AlignmentError(f"unknown token source {span.source!r}", remedy=f"use one of {sorted(_SOURCES)}")
    if min(span.token_ids, default=0) < 0:
        raise AlignmentError(f"token id {min(span.token_ids)} of a {span.source} span is negative")


def _check_shown(span: TokenSpan) -> None:
    """Check the images of a span."""
    if span.source not in _SHOWN:
        raise AlignmentError(f"a {span.source} span must not have images, which no model samples")
    check_images(span.images, len(span))


def _all_logprobs(values: tuple[float, ...]) -> bool:
    """Return whether all values are logprobs; fast, so that only a failure needs the loop for its message."""
    return set(map(type, values)) <= {float} and all(map(isfinite, values)) and max(values, default=0.0) <= 0


def _cut_span(span: TokenSpan, length: int) -> TokenSpan:
    logprobs = None if span.logprobs is None else span.logprobs[:length]
    supports = None if span.supports is None else span.supports.cut(0, length)
    images = images_between(span.images, 0, length)
    return TokenSpan(
        span.source, span.token_ids[:length], logprobs, span.weights_version, span.turn, supports, images
    )


class Prompt(list[int]):
    """Token ids of a rendered text, with the images among them."""

    def __init__(self, ids: Iterable[int] = (), images: Sequence[ImageTokens] = ()) -> None:
        super().__init__(ids)
        self.images: tuple[ImageTokens, ...] = tuple(images)
        check_images(self.images, len(self))

    def __repr__(self) -> str:
        return one_line(self, f"{len(self)} tokens", f"{len(self.images)} images")


def images_of(ids: Sequence[int]) -> tuple[ImageTokens, ...]:
    """Return the images among token ids that a renderer has returned; plain lists have none."""
    return ids.images if isinstance(ids, Prompt) else ()


class SequenceBuilder:
    """Builds a sequence by appending; appending costs time in proportion to the new tokens only.

    `token_ids` is the flat list that the engine gets as its prompt. Callers may read it and must not change
    it. Appending no tokens adds no span.
    """

    # Invariant: `token_ids` is the concatenation of the token ids of `_spans`, and `images` of their images.
    # Invariant: `_routed` holds the experts of the first `_num_routed` tokens, part by part.

    __slots__ = ("_num_routed", "_routed", "_spans", "images", "token_ids")

    def __init__(self) -> None:
        self._spans: list[TokenSpan] = []
        self._routed: list[RoutedExperts] = []
        self._num_routed = 0
        self.token_ids: list[int] = []
        self.images: list[ImageTokens] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def keys(self) -> list[int]:
        """What to compare with other contexts; see `TokenSequence.keys`."""
        return keys_of(self.token_ids, self.images) if self.images else self.token_ids

    def append(
        self,
        source: Source,
        token_ids: Sequence[int],
        *,
        logprobs: Sequence[float] | None = None,
        weights_version: int | None = None,
        turn: int = -1,
        supports: Supports | None = None,
    ) -> None:
        """Append one span, with the images that a renderer has put among its ids.

        Raises:
            AlignmentError: The span breaks an invariant. Nothing is appended in this case.
        """
        flat = None if logprobs is None else tuple(logprobs)
        images = images_of(token_ids)
        span = TokenSpan(source, tuple(token_ids), flat, weights_version, turn, supports, images)
        if span.token_ids:
            self._spans.append(span)
            self.images += [image.moved(len(self.token_ids)) for image in images]
            self.token_ids.extend(span.token_ids)

    def append_completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        version_ranges: Sequence[tuple[int, int, int]],
        *,
        turn: int,
        supports: Supports | None = None,
    ) -> None:
        """Append a completion, as one span for each version of the weights that sampled a part of it.

        Args:
            token_ids: the sampled ids.
            logprobs: one logprob for each id.
            version_ranges: `(weights_version, start, end)` of each part; together they cover all ids.
            turn: index of the assistant turn.
            supports: the support of each id, if it was kept.

        Raises:
            AlignmentError: The lengths differ, or the ranges do not cover the ids.
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
            TokenSpan(
                "model",
                tuple(token_ids[start:end]),
                tuple(logprobs[start:end]),
                version,
                turn,
                None if supports is None else supports.cut(start, end),
            )
            for version, start, end in version_ranges
        ]
        for span in spans:
            if span.token_ids:
                self._spans.append(span)
                self.token_ids.extend(span.token_ids)

    def route(self, routed: RoutedExperts | None) -> None:
        """Record the experts that the engine chose in a request, of which all tokens so far are the result.

        A token keeps the choices of the first request that told some. These are the choices with which its
        keys and values were computed, as long as the engine keeps them between the requests of an episode.

        Args:
            routed: the experts of all tokens so far but the last, which no request has seen as input; None
                if the engine told none.

        Raises:
            AlignmentError: The experts are those of another number of tokens.
        """
        if routed is None:
            return
        if len(routed) != len(self.token_ids) - 1:
            raise AlignmentError(
                f"the engine told the experts of {len(routed)} tokens, but prompt and completion have "
                f"{len(self.token_ids)}, of which all but the last have experts"
            )
        new = routed.part(self._num_routed, len(routed))
        self._routed.append(new)
        self._num_routed = len(routed)

    def freeze(self) -> TokenSequence:
        """Return what was appended so far as an immutable sequence."""
        routed = self._routed[0].then(self._routed[1:]) if self._routed else None
        return TokenSequence(tuple(self._spans), routed)
