"""The support of each sampled token: the tokens that top-k, top-p and min-p left to sample from.

A token that was sampled from a cut distribution has the probability that it had among its support. Whoever
trains on it must compute its probability over exactly the same support, or the ratio of the two is biased.
DeepSeek-V3.2 keeps the sampler's mask for this reason (arXiv:2512.02556, section 3.1, "Keep Sampling Mask").

The types keep these invariants, and `tests/property/test_supports.py` tests them:

1. There is one support for each sampled token, and the token is in it.
2. The ids of a support are not negative, and each stands once, in ascending order.
3. A support has at most `MOST_TOKENS` tokens.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import lt

from agentenv.core.errors import AlignmentError

__all__ = ["MOST_TOKENS", "Supports", "SupportsBuilder"]

MOST_TOKENS = 4096
"""Most tokens of a recorded support, which takes four bytes for each of them in memory."""

_CODE = "i"
"""Type code of `array` for 32-bit integers."""


@dataclass(frozen=True, slots=True)
class Supports:
    """The supports of consecutive sampled tokens.

    Example:
        >>> supports = Supports.of([(5, 2), (7,)])
        >>> supports[0], supports[1]
        ((2, 5), (7,))

    Raises:
        AlignmentError: A support is empty, too large, not ascending or negative, or the lengths do not sum
            to the number of ids.
    """

    # The arrays are never changed. Unlike tuples they take four bytes for an id, but they cannot be hashed.
    token_ids: array[int] = field(hash=False)
    """The ids of all supports, one support after the other."""
    lengths: array[int] = field(hash=False)
    """Number of tokens in each support."""

    def __post_init__(self) -> None:
        ids, end = self.token_ids, 0
        for index, length in enumerate(self.lengths):
            if not 0 < length <= MOST_TOKENS:
                raise AlignmentError(
                    f"the support of sampled token {index} has {length} tokens, not 1 to {MOST_TOKENS}"
                )
            own = ids[end : end + length]
            end += length
            if own and (own[0] < 0 or not all(map(lt, own, own[1:]))):
                raise AlignmentError(
                    f"the support of sampled token {index} is not ascending from 0: {own.tolist()!r:.80}"
                )
        if end != len(ids):
            raise AlignmentError(f"the supports have {end} tokens, but there are {len(ids)} ids")

    @classmethod
    def of(cls, supports: Iterable[Iterable[int]]) -> Supports:
        """Return the supports of these tokens, in any order of their ids."""
        parts = [sorted(support) for support in supports]
        return cls(array(_CODE, chain.from_iterable(parts)), array(_CODE, map(len, parts)))

    @classmethod
    def flat(cls, token_ids: Iterable[int], lengths: Iterable[int]) -> Supports:
        """Return the supports whose ids stand one after the other."""
        return cls(array(_CODE, token_ids), array(_CODE, lengths))

    @classmethod
    def joined(cls, parts: Sequence[Supports]) -> Supports:
        """Return the supports of tokens that follow each other."""
        ids = chain.from_iterable(part.token_ids for part in parts)
        return cls.flat(ids, chain.from_iterable(part.lengths for part in parts))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[int, ...]:
        start = sum(self.lengths[:index])
        return tuple(self.token_ids[start : start + self.lengths[index]])

    def tolist(self) -> list[list[int]]:
        """Return the ids of each support."""
        ids = iter(self.token_ids)
        return [list(islice(ids, length)) for length in self.lengths]

    @property
    def highest(self) -> int:
        """The highest id of all supports; -1 if there are none."""
        return max(self.token_ids, default=-1)

    def cut(self, start: int, end: int) -> Supports:
        """Return the supports of the tokens from `start` to before `end`."""
        first = sum(self.lengths[:start])
        lengths = self.lengths[start:end]
        return Supports(self.token_ids[first : first + sum(lengths)], lengths)

    def require(self, sampled: Sequence[int]) -> None:
        """Check that each of the sampled tokens is in its support.

        Raises:
            AlignmentError: One is not, or there are more or fewer supports than tokens.
        """
        if len(sampled) != len(self):
            raise AlignmentError(f"{len(sampled)} sampled tokens but {len(self)} supports")
        start = 0
        for index, (token, length) in enumerate(zip(sampled, self.lengths, strict=True)):
            end = start + length
            place = bisect_left(self.token_ids, token, start, end)
            if place == end or self.token_ids[place] != token:
                raise AlignmentError(f"sampled token {index} is {token}, which is not in its support")
            start = end


class SupportsBuilder:
    """Collects the supports of a completion while it is sampled."""

    __slots__ = ("_lengths", "_token_ids", "reason")

    def __init__(self) -> None:
        self._token_ids = array(_CODE)
        self._lengths = array(_CODE)
        self.reason = ""
        """Why the completion has no supports, and what to change; empty while it has them."""

    def append(self, support: array[int] | int) -> None:
        """Add the support of the next token; of one that is too large only its size is passed."""
        if isinstance(support, int):
            self.reason = self.reason or too_large(len(self._lengths), str(support))
        elif not self.reason:
            self._token_ids.extend(support)
            self._lengths.append(len(support))

    def freeze(self) -> Supports | None:
        """Return the supports; None if one was too large."""
        return None if self.reason else Supports(self._token_ids, self._lengths)


def too_large(index: int, size: str, most: int = MOST_TOKENS) -> str:
    """Return why a completion has no supports, of which one is too large.

    Args:
        index: index of its token in the completion.
        size: number of its tokens, in words.
        most: most tokens of a support that are recorded.
    """
    return (
        f"sampled from a cut distribution that left {size} tokens for token {index} of a completion, and at "
        f"most {most} are recorded: set top_k to at most {most}"
    )
