"""Rows to train on: one token sequence each, cut after its last trained token.

The log-probability of a token that was sampled from a cut distribution is `log_softmax` over its support
only, under the trained policy, the proximal policy and the reference alike. With the sampler's probabilities,
which are over the same support, importance ratios have the right mean. This is the "Keep Sampling Mask" of
DeepSeek-V3.2 (arXiv:2512.02556, section 3.1). Tokens with an empty support were not cut: their distribution
covers the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentenv.core.errors import UsageError
from agentenv.core.images import ImageTokens, images_between, keys_of
from agentenv.core.routed_experts import RoutedExperts
from agentenv.core.sequence import TokenSequence, TokenSpan

__all__ = ["Row", "Scores", "TokenSupports", "fit_rows", "make_row", "to_device"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device.

    From memory that is not pinned, a copy to CUDA waits for everything that the device still has to do.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class TokenSupports:
    """The supports of N tokens, in main memory."""

    token_ids: Tensor
    """The ids of all supports, one after the other, as 32-bit integers."""
    lengths_N: Tensor
    """Number of tokens in each support; 0 for a token that was sampled from the whole vocabulary."""

    @classmethod
    def of_spans(cls, spans: Sequence[TokenSpan], mask: Tensor) -> TokenSupports | None:
        """Return the supports of the masked tokens of a sequence; None if none of its tokens has one.

        Args:
            spans: the spans of the sequence.
            mask: which of its tokens to take.
        """
        if all(span.supports is None for span in spans):
            return None
        nothing = torch.zeros(0, dtype=torch.int32)
        lengths, ids = [nothing], [nothing]
        for span in spans:
            if span.supports:
                lengths.append(torch.frombuffer(span.supports.lengths, dtype=torch.int32))
                ids.append(torch.frombuffer(span.supports.token_ids, dtype=torch.int32))
            else:
                lengths.append(torch.zeros(len(span), dtype=torch.int32))
        lengths_T = torch.cat(lengths).long()
        return cls(torch.cat(ids)[mask.repeat_interleave(lengths_T)], lengths_T[mask])

    @classmethod
    def joined(cls, parts: Iterable[tuple[TokenSupports | None, int]]) -> TokenSupports | None:
        """Return the supports of rows in order; None if no row has one.

        Args:
            parts: the supports of each row, if it has any, and its number of trained tokens.
        """
        parts = list(parts)
        kept = [supports for supports, _ in parts if supports is not None]
        if not kept:
            return None
        lengths = [
            torch.zeros(count, dtype=torch.long) if supports is None else supports.lengths_N
            for supports, count in parts
        ]
        return cls(torch.cat([supports.token_ids for supports in kept]), torch.cat(lengths))

    def part(self, part: slice) -> TokenSupports:
        """Return the supports of some adjacent tokens."""
        first = int(self.lengths_N[: part.start].sum())
        lengths_N = self.lengths_N[part]
        return TokenSupports(self.token_ids[first : first + int(lengths_N.sum())], lengths_N)

    @property
    def highest(self) -> int:
        """The highest id of all supports; -1 if all are empty."""
        return int(self.token_ids.max()) if self.token_ids.numel() else -1

    def cut_(self, logits_NV: Tensor) -> None:
        """Give the logits outside the supports a probability of 0, in place and without a second matrix."""
        place, cut = self._place(logits_NV.device)
        kept = logits_NV[place]
        logits_NV.index_fill_(0, cut, _lowest(logits_NV))
        logits_NV.index_put_(place, kept)

    def cut(self, logits_NV: Tensor) -> Tensor:
        """Return logits that have a probability of 0 outside the supports."""
        place, cut = self._place(logits_NV.device)
        left_out_NV = torch.zeros(logits_NV.shape, dtype=torch.bool, device=logits_NV.device)
        left_out_NV.index_fill_(0, cut, value=True)
        left_out_NV[place] = False
        return logits_NV.masked_fill(left_out_NV, _lowest(logits_NV))

    def _place(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return row and column of each token of the supports, and the rows that are cut."""
        rows = torch.arange(len(self.lengths_N)).repeat_interleave(self.lengths_N)
        cut = self.lengths_N.nonzero()[:, 0]
        ids = to_device(self.token_ids, device).long()
        return (to_device(rows, device), ids), to_device(cut, device)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One sequence to train on; tensors named `_n` have one value for each of its n trained tokens.

    What a step adds (the scores of the fixed policies, the weight in an update) is in a row made from this
    one; what an update finds out about a row is beside it, in `Scores`.
    """

    # Invariant: all tensors `_n` have the same length and order as `positions_n`.
    token_ids: list[int]
    """Tokens of the sequence up to the last trained one, which is included."""
    positions_n: Tensor
    """Indices of the trained tokens in `token_ids`; never 0, because nothing predicts the first token."""
    sampler_n: Tensor
    """The sampler's logprobs, in float64. They are converted to the format of the scores beside them."""
    advantages_n: Tensor
    episode: int
    group: int
    weight: float = 0.0
    """Weight of each token in the loss of one optimiser step."""
    old_n: Tensor | None = None
    """Log-probabilities under the proximal policy; None if they are the sampler's, or the policy's own."""
    ref_n: Tensor | None = None
    """Log-probabilities under the reference; None if there is none."""
    demonstration: bool = False
    """Whether the row is trained by cross entropy instead of the policy loss."""
    member: int = 0
    """Index of the episode in its group."""
    sequence: int = 0
    """Index of the sequence in its episode."""
    counted_only: bool = False
    """Whether the row is not trained and only counts in the weights of the other rows."""
    turns_n: Tensor | None = None
    """Index of each token's assistant turn in its episode, from 0; None means 0 for all."""
    attempts_n: Tensor | None = None
    """Index of the attempt that each token belongs to, from 0; None means 0 for all."""
    routed_experts: RoutedExperts | None = None
    """Experts that the tokens but the last are sent to; None if the routers choose."""
    supports: TokenSupports | None = None
    """What the trained tokens were sampled from; None if all of them from the whole vocabulary."""
    images: tuple[ImageTokens, ...] = ()
    """The images among the tokens."""

    @property
    def keys(self) -> list[int]:
        """What to compare with other rows, because different images may have equal tokens."""
        return keys_of(self.token_ids, self.images) if self.images else self.token_ids

    @property
    def num_trained(self) -> int:
        """Number of trained tokens."""
        return self.positions_n.numel()

    def indices(self) -> tuple[Tensor, Tensor]:
        """Return the turn and the attempt of each trained token."""
        none_n = torch.zeros_like(self.positions_n)
        turns_n, attempts_n = self.turns_n, self.attempts_n
        return none_n if turns_n is None else turns_n, none_n if attempts_n is None else attempts_n


class Scores(NamedTuple):
    """What an update's pass found of a row, under the weights before the update."""

    logprobs_n: Tensor
    entropy_n: Tensor | None = None
    """Entropy of the policy at each trained token; None if the learner does not know it."""


def fit_rows(
    rows: Iterable[Row | None], max_length: int | None, vocab_size: int | None, dropped: Counter[str]
) -> Iterator[Row]:
    """Yield the rows that the model can take, and count the others by reason."""
    for row in rows:
        reason = _unfit_row(row, max_length, vocab_size)
        if row is None or reason:
            dropped[reason] += 1
        else:
            yield row


def make_row(
    sequence: TokenSequence,
    advantage: float | Sequence[float],
    episode: int,
    group: int,
    *,
    demonstration: bool = False,
    attempts: Sequence[int] = (),
    replay: bool = False,
) -> Row | None:
    """Return the row of a sequence; None if it has no token to train.

    Args:
        sequence: the sequence.
        advantage: its advantage, or that of each of its tokens.
        episode: index of its episode.
        group: index of its group.
        demonstration: whether it is trained by cross entropy.
        attempts: the attempt that each turn of the episode belongs to.
        replay: whether the row takes over the experts that the engine chose.

    Raises:
        UsageError: There is not one advantage for each token, or the engine told no experts.
    """
    # By way of numpy, which reads a list several times as fast, and span by span: not a list of each view.
    spans = sequence.spans
    lengths = np.array([len(span) for span in spans], dtype=np.int64)
    mask = torch.from_numpy(np.array([span.trained for span in spans], dtype=bool).repeat(lengths))
    mask[:1] = False  # the first token has no prediction
    positions_n = mask.nonzero().squeeze(-1)
    if positions_n.numel() == 0:
        return None
    if isinstance(advantage, (int, float)):
        advantages_n = torch.full(positions_n.shape, float(advantage), dtype=torch.float64)
    else:
        if len(advantage) != len(sequence):
            raise UsageError(
                f"{len(advantage)} per-token advantages for a sequence of {len(sequence)} tokens"
            )
        advantages_n = torch.tensor(advantage, dtype=torch.float64)[positions_n]
    logprobs = [np.array(span.logprobs or np.zeros(len(span)), dtype=np.float64) for span in spans]
    sampler_n = torch.from_numpy(np.concatenate(logprobs))[positions_n]
    token_ids = sequence.token_ids[: int(positions_n[-1]) + 1]
    turns = np.array([span.turn for span in spans], dtype=np.int64).repeat(lengths)
    turns_n = torch.from_numpy(turns)[positions_n].clamp(min=0)
    return Row(
        token_ids,
        positions_n,
        sampler_n,
        advantages_n,
        episode,
        group,
        demonstration=demonstration,
        turns_n=turns_n,
        attempts_n=torch.tensor(attempts)[turns_n] if any(attempts) else None,
        routed_experts=_routed(sequence, len(token_ids) - 1) if replay else None,
        images=images_between(sequence.images, 0, len(token_ids)) if sequence.images else (),
        # Imitation raises the probability of a token among all others, whatever it was sampled from.
        supports=None if demonstration else TokenSupports.of_spans(spans, mask),
    )


def _routed(sequence: TokenSequence, length: int) -> RoutedExperts:
    """Return the experts of the first tokens of a sequence."""
    routed = sequence.routed_experts
    if routed is None or len(routed) < length:
        known = 0 if routed is None else len(routed)
        raise UsageError(
            f"router_replay is set, but the engine told the experts of {known} of the {length} tokens of an "
            "episode",
            remedy="sample with an engine that tells them (return_routed_experts=True), or set "
            "router_replay=False",
        )
    return routed.part(0, length)


def _unfit_row(row: Row | None, max_length: int | None, vocab_size: int | None) -> str:
    """Return the name of the metric that counts why a sequence is left out; empty if it is trained."""
    if row is None:
        return "rows_without_trained_tokens"
    if max_length is not None and len(row.token_ids) > max_length:
        return "rows_too_long"
    highest = max(row.token_ids) if row.supports is None else max(*row.token_ids, row.supports.highest)
    if vocab_size is not None and highest >= vocab_size:
        raise UsageError(
            f"token id {highest} is outside the model's vocabulary of {vocab_size}: "
            "the trajectories were made with another tokenizer"
        )
    return ""


def _lowest(logits_NV: Tensor) -> float:
    """Return the logit of a token that was left out; unlike an infinite one, it times 0 is 0."""
    return torch.finfo(logits_NV.dtype).min
