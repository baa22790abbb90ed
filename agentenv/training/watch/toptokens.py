"""The trained tokens on which two policies differ most, with the text before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from agentenv.core.trajectory import TrajectoryGroup
from agentenv.training.learners.torch.world import World
from agentenv.training.objective.loss import kl_penalty
from agentenv.training.rows import Row

__all__ = ["TokenKL", "top_tokens"]

BEFORE = 12
"""Number of preceding tokens that are shown with a token."""


@dataclass(frozen=True, slots=True)
class TokenKL:
    """One sampled token with its share of the step's KL divergence."""

    kl: float
    """k3 estimate of KL(policy || reference); without a reference, of KL(sampler || policy)."""
    token_id: int
    before: tuple[int, ...]
    """Up to twelve tokens that precede the token."""
    logprob: float
    """Log-probability under the policy in the last pass of the step."""
    other_logprob: float
    """Log-probability under the reference, or under the sampler if there is no reference."""
    group_id: str
    member: int
    position: int
    """Index of the token in its sequence."""

    def record(self, text_of: Callable[[Sequence[int]], str]) -> dict[str, object]:
        """Return the token as JSON values, with its text and the text before it."""
        return {
            "kl": self.kl,
            "text": text_of([self.token_id]),
            "before": text_of(self.before),
            "token_id": self.token_id,
            "logprob": self.logprob,
            "other_logprob": self.other_logprob,
            "group_id": self.group_id,
            "member": self.member,
            "position": self.position,
        }


def top_tokens(
    rows: Sequence[Row], groups: Sequence[TrajectoryGroup], count: int, world: World
) -> list[TokenKL]:
    """Return the `count` tokens with the highest KL in the last step of all processes, highest first."""
    candidates = world.gather(_highest(rows, groups, count))
    return sorted(candidates, key=lambda token: -token.kl)[:count]


def _highest(rows: Sequence[Row], groups: Sequence[TrajectoryGroup], count: int) -> list[TokenKL]:
    scored = [row for row in rows if row.new_n is not None and not row.demonstration]
    if not scored or count < 1:
        return []
    values = torch.cat([_kl(row) for row in scored])
    owners = [(row, index) for row in scored for index in range(row.num_trained)]
    best = values.topk(min(count, len(values)))
    tokens: list[TokenKL] = []
    for value, rank in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        row, index = owners[rank]
        tokens.append(_token(row, index, groups, value))
    return tokens


def _kl(row: Row) -> torch.Tensor:
    assert row.new_n is not None
    new_n, other_n = row.new_n.double().cpu(), _other(row)
    # With a reference this is KL(policy || reference), otherwise KL(sampler || policy).
    return kl_penalty(new_n, other_n) if row.ref_n is not None else kl_penalty(other_n, new_n)


def _other(row: Row) -> torch.Tensor:
    return (row.sampler_n if row.ref_n is None else row.ref_n).double().cpu()


def _token(row: Row, index: int, groups: Sequence[TrajectoryGroup], value: float) -> TokenKL:
    assert row.new_n is not None
    position = int(row.positions_n[index])
    member = groups[row.group].trajectories[row.member]
    return TokenKL(
        kl=value,
        token_id=row.token_ids[position],
        before=tuple(row.token_ids[max(0, position - BEFORE) : position]),
        logprob=float(row.new_n[index]),
        other_logprob=float(_other(row)[index]),
        group_id=member.group_id,
        member=member.member,
        position=position,
    )
