"""The trained tokens on which two policies differ most, to be read with their text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from agentenv.core.trajectory import TrajectoryGroup
from agentenv.train.batch import Row
from agentenv.train.objective.loss import kl_penalty
from agentenv.train.world import World

__all__ = ["TokenKL", "top_tokens"]

BEFORE = 12
"""Tokens before it that are shown with a token."""


@dataclass(frozen=True, slots=True)
class TokenKL:
    """One sampled token, with its share of a step's KL divergence."""

    kl: float
    """k3 estimate: to the reference if there is one, else of the policy from the sampler."""
    token_id: int
    before: tuple[int, ...]
    """The tokens that came before it, at most twelve."""
    logprob: float
    """Under the policy, in the last pass of the step."""
    other_logprob: float
    """Under the reference or the sampler."""
    group_id: str
    member: int
    position: int
    """Place in its sequence."""

    def record(self, text_of: Callable[[Sequence[int]], str]) -> dict[str, object]:
        """Return it as JSON values, with its text and what came before."""
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
    """Return the `count` tokens with the highest KL of what all processes just trained, highest first."""
    found = world.gather(_highest(rows, groups, count))
    return sorted(found, key=lambda one: -one.kl)[:count]


def _highest(rows: Sequence[Row], groups: Sequence[TrajectoryGroup], count: int) -> list[TokenKL]:
    scored = [row for row in rows if row.new_n is not None and not row.demonstration]
    if not scored or count < 1:
        return []
    values = torch.cat([_kl(row) for row in scored])
    owners = [(row, index) for row in scored for index in range(row.num_trained)]
    best = values.topk(min(count, len(values)))
    found: list[TokenKL] = []
    for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        row, index = owners[place]
        found.append(_token(row, index, groups, value))
    return found


def _kl(row: Row) -> torch.Tensor:
    assert row.new_n is not None
    new_n, other_n = row.new_n.double().cpu(), _other(row)
    # To the reference it is KL(policy || reference); from the sampler, what its samples say of the policy.
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
