"""Supports of trained tokens as tensors: what the sampler could have drawn in the place of each token.

The log-probability of a token that was sampled from a cut distribution is `log_softmax` over its support
only, under the trained policy, the proximal policy and the reference alike. With the sampler's probabilities,
which are over the same support, importance ratios have the right mean. This is the "Keep Sampling Mask" of
DeepSeek-V3.2 (arXiv:2512.02556, section 3.1). Tokens with an empty support were not cut: their distribution
covers the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentenv.core.sequence import TokenSpan

__all__ = ["TokenSupports"]


@dataclass(slots=True, eq=False)
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
        kept = [one for one, _ in parts if one is not None]
        if not kept:
            return None
        lengths = [
            torch.zeros(count, dtype=torch.long) if one is None else one.lengths_N for one, count in parts
        ]
        return cls(torch.cat([one.token_ids for one in kept]), torch.cat(lengths))

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
        return (rows.to(device), self.token_ids.to(device).long()), cut.to(device)


def _lowest(logits_NV: Tensor) -> float:
    """Return the logit of a token that was left out; unlike an infinite one, it times 0 is 0."""
    return torch.finfo(logits_NV.dtype).min
