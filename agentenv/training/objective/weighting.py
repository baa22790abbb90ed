"""One weight per token: every normalisation of the loss, computed once over the global batch.

The loss is `sum_t w_t * l_t`. The weights `w_t` are computed over the whole optimiser step (all
micro-batches, all ranks), so splitting the sum in any way cannot change it. The usual mean of micro-batch
means is off by more than a tenth on ordinary batches. SkyRL multiplies its reductions into the advantages
for the same reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from agentenv.core.errors import UsageError
from agentenv.training.config import Reduction

__all__ = ["token_weights"]


def token_weights(
    lengths: Sequence[int],
    *,
    reduction: Reduction,
    episodes: Sequence[Hashable] | None = None,
    groups: Sequence[Hashable] | None = None,
    max_tokens: int | None = None,
    total: Callable[[float], float] = float,
) -> list[float]:
    """Return the weight of every trained token of each row.

    - `token_mean`: 1 / N, N trained tokens in all (DAPO);
    - `seq_mean`: 1 / (E * tokens of the row's episode) (GRPO);
    - `constant`: 1 / (E * max_tokens) (Dr.GRPO);
    - `prompt_mean`: 1 / (P * tokens of the row's group) (SkyRL).

    E and P count the episodes and groups that have a trained token.
    An episode that was forked into several rows counts once, with the tokens of all its rows.

    Args:
        lengths: number of trained tokens of each row.
        reduction: name of the normalisation.
        episodes: the episode of each row; None means that each row is an episode.
        groups: the group of each row; `prompt_mean` needs it.
        max_tokens: the divisor of `constant`.
        total: sums a number over all ranks. All rows of an episode or group must be on the same rank.

    Raises:
        UsageError: The reduction is unknown, or an argument that it needs is missing.
    """
    rows = range(len(lengths))
    episodes = rows if episodes is None else episodes
    if reduction == "token_mean":
        count = total(float(sum(lengths)))
        return [1.0 / count if count else 0.0] * len(lengths)
    if reduction == "prompt_mean":
        if groups is None:
            raise UsageError("reduction 'prompt_mean' needs the group of each row")
        return _shares(lengths, groups, total)
    if reduction == "seq_mean":
        return _shares(lengths, episodes, total)
    if reduction == "constant":
        if not max_tokens or max_tokens < 1:
            raise UsageError(f"reduction 'constant' needs max_tokens of at least 1, not {max_tokens}")
        alive = {episode for episode, length in zip(episodes, lengths, strict=True) if length}
        count = total(float(len(alive))) * max_tokens
        return [1.0 / count if count else 0.0] * len(lengths)
    raise UsageError(f"unknown reduction {reduction!r}")


def _shares(lengths: Sequence[int], keys: Sequence[Hashable], total: Callable[[float], float]) -> list[float]:
    """Return weights that give each key the same share, spread evenly over its tokens."""
    tokens: dict[Hashable, int] = defaultdict(int)
    for key, length in zip(keys, lengths, strict=True):
        tokens[key] += length
    count = total(float(sum(1 for held in tokens.values() if held)))
    return [1.0 / (count * tokens[key]) if tokens[key] else 0.0 for key in keys]
