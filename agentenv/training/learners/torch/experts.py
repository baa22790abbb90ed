"""How evenly the tokens of an optimiser step are spread over the experts, and the loss that balances them.

The load balancing loss is a product of two means, so that of a step is not a sum over its tokens. As nearly
everywhere, it is computed for each micro-batch and weighted by the micro-batch's share of the step's tokens,
over all processes. How rows are split into micro-batches therefore changes it a little: each of them is
balanced by itself. Over one micro-batch it is the loss that transformers computes for the same tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from agentenv.training.learners.torch.packing import MicroBatch
from agentenv.training.learners.torch.policy import Policy
from agentenv.training.learners.torch.routers import RouterPass
from agentenv.training.sums import Meter

__all__ = ["ExpertLoad"]


class ExpertLoad:
    """The load of the experts in one optimiser step; nothing for a model without routers.

    Args:
        policy: the model in training.
        tokens: number of tokens that the passes of all processes compute in this step, without padding.
    """

    def __init__(self, policy: Policy, tokens: float) -> None:
        self._policy = policy
        self._tokens = tokens
        self._counts_LE: Tensor | None = None

    def watched(self) -> AbstractContextManager[RouterPass | None]:
        """Return a context in which the routers of a pass are watched."""
        routers = self._policy.routers
        return nullcontext() if routers is None else routers.watched()

    def loss(
        self, micro: MicroBatch, passed: RouterPass | None, meter: Meter | None = None
    ) -> Tensor | float:
        """Return what a micro-batch adds to the loss of the step.

        Args:
            micro: the micro-batch.
            passed: what the routers computed for it.
            meter: collects the metrics.
        """
        coefficient = self._policy.config.router_aux_loss_coef
        if passed is None:
            return 0.0
        real_T = micro.real_T.to(self._policy.device)
        if not micro.idle:
            counts_LE = passed.counts_LE(real_T)
            self._counts_LE = counts_LE if self._counts_LE is None else self._counts_LE + counts_LE
        if not coefficient:
            return 0.0
        loss = passed.balance_loss(real_T)
        if meter is not None and not micro.idle:
            meter.add({"moe/aux_loss": loss.detach() * micro.num_tokens}, micro.num_tokens)
        return loss * (0.0 if micro.idle else coefficient * micro.num_tokens / self._tokens)

    def tell(self, meter: Meter) -> None:
        """Record the load of the fullest expert. All processes call this together."""
        if self._policy.routers is None:
            return
        counts = [] if self._counts_LE is None else [self._counts_LE.tolist()]
        gathered = self._policy.world.gather(counts)
        if gathered:
            counts_LE = torch.tensor(gathered).sum(0)
            share_LE = counts_LE / counts_LE.sum(-1, keepdim=True)
            meter.add_extremes({"moe/load/max": share_LE.max() * counts_LE.shape[-1]})
