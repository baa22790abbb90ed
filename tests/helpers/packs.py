"""Attention over a pack as a mask of all pairs of its tokens, which is the truth for the ways that hold none."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentenv.training.learners.torch import Policy
from agentenv.training.learners.torch.attention import Node
from agentenv.training.learners.torch.packing import MicroBatch


def gradient_of(policy: Policy, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of a micro-batch, and the gradient of a sum in which each has a weight."""
    policy.model.zero_grad()
    logprobs, _ = policy.score(micro)
    weights = torch.linspace(-1, 2, logprobs.numel(), dtype=logprobs.dtype)
    (weights * logprobs).sum().backward()
    grads = [one.grad.flatten() for one in policy.model.parameters() if one.grad is not None]
    return logprobs.detach(), torch.cat(grads)


def block_mask(nodes: Sequence[Node]) -> torch.Tensor:
    """Return a mask `[T, T]` that is true if a query (row) sees a key (column)."""
    size = max(node.stop for node in nodes)
    keep_TT = torch.zeros(size, size, dtype=torch.bool)
    for start, stop, end in nodes:
        own = stop - start
        keep_TT[start:stop, start:stop] = torch.ones(own, own, dtype=torch.bool).tril()
        keep_TT[stop:end, start:stop] = True
    return keep_TT
