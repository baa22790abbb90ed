"""Passes of the model over rows: gradients of micro-batches, and scores without gradients.

Each process computes about as many tokens as the others, whichever process played the episodes: episodes
differ much in length, and an update is as slow as its slowest process. Advantages, optimiser steps and token
weights are decided where a row was played, over whole groups. Only then do single rows move, with their
weights, and their scores come back. So who computes a row changes nothing but the order of sums.

The load balancing loss of a mixture of experts is a product of two means, so that of a step is not a sum over
its tokens. As nearly everywhere, it is computed for each micro-batch and weighted by the micro-batch's share
of the step's tokens, over all processes. How rows are split into micro-batches therefore changes it a little:
each of them is balanced by itself. Over one micro-batch it is the loss that transformers computes for the
same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from agentenv.core.faults import first_line_of
from agentenv.core.visible import logger
from agentenv.training.learners.losses import rows_loss
from agentenv.training.learners.torch.packing import MicroBatch, pad_rows, plan
from agentenv.training.learners.torch.policy import Policy
from agentenv.training.learners.torch.world import World
from agentenv.training.metrics import Meter
from agentenv.training.objective.loss import LossInputs
from agentenv.training.rows import Row, Scores, to_device
from agentenv.training.stop import stop

if TYPE_CHECKING:
    from agentenv.training.learners.torch.routers import RouterPass

log = logger(__name__)

T = TypeVar("T")
_RowScores: TypeAlias = tuple[Tensor, Tensor]
"""Log-probability and entropy of each trained token of a row."""

__all__ = ["Exchange", "ExpertLoad", "accumulate", "destinations", "micro_batches", "score_rows"]


def micro_batches(policy: Policy, rows: Sequence[Row]) -> list[MicroBatch]:
    """Return the rows as micro-batches, the largest first.

    With a sharded model all ranks get the same number of them. The ranks compute each pass together, so those
    of one pass should be equally large.
    """
    packs = policy.packable
    if policy.vision is not None and not policy.vision.packs:
        packs = packs and not any(row.images for row in rows)
    layout = policy.config.packing if packs else "padded"
    micros = plan(rows, layout=layout, max_tokens=policy.budget.tokens, cost=policy.cost)
    micros.sort(key=lambda micro: -micro.ids_BT.numel())
    if policy.world.sharded:
        micros += [_idle_micro() for _ in range(policy.world.most(len(micros)) - len(micros))]
    return micros


def _idle_micro() -> MicroBatch:
    """Return a micro-batch of weight 0, for a rank that must make as many passes as the others."""
    nothing = torch.zeros(1, dtype=torch.float64)
    row = Row([0, 0], torch.tensor([1]), nothing, nothing, episode=-1, group=-1, ref_n=nothing)
    return replace(pad_rows([row]), idle=True)


def accumulate(
    policy: Policy,
    rows: Sequence[Row],
    meter: Meter,
    *,
    loss_fn: Callable[[LossInputs], torch.Tensor] | None = None,
    moved: bool = False,
    clear: Callable[[], None] = lambda: None,
) -> tuple[float, list[Scores]]:
    """Add the gradient of the rows' loss to the model's; return this rank's part of it and its rows' scores.

    `clear` is called first, and again whenever memory ran out and all passes are made anew, because a pass
    that was broken off has added a part of its gradient.

    The ranks compute about as many tokens each. If an earlier update of the batch has changed the weights,
    the distance to the sampler's logprobs is no longer a mismatch of the engine, so the mismatch metrics are
    not recorded.
    """
    exchange = Exchange(policy.world, rows)

    def passes(micros: Sequence[MicroBatch]) -> tuple[float, Meter, ExpertLoad, dict[Row, _RowScores]]:
        clear()
        tokens = sum(micro.num_tokens for micro in micros if not micro.idle)
        load = ExpertLoad(policy, tokens if policy.routers is None else policy.world.total(tokens))
        # Losses are read after the last pass, so that the host prepares a pass while the device works.
        part, losses, scores = Meter(), list[Tensor](), dict[Row, _RowScores]()
        for number, micro in enumerate(micros, start=1):
            stop.before_pass()
            log.info("update %d of %d passes", number - 1, len(micros))
            last = number == len(micros)
            policy.world.reduce_gradients(policy.base, each=policy.reduces_each_pass, last=last)
            added, scored = _backward(policy, micro, part, load, loss_fn=loss_fn, moved=moved)
            losses.append(added)
            scores |= zip(micro.rows, scored, strict=True)
        return sum(torch.stack(losses).tolist()) if losses else 0.0, part, load, scores

    loss, part, load, scores = _in_memory(policy, exchange.rows, passes, meter)
    meter.extend(part)
    load.tell(meter)
    home = exchange.home([scores[row] for row in exchange.rows])
    return loss, [Scores(*values) for values in home]


def _in_memory(
    policy: Policy,
    rows: Sequence[Row],
    passes: Callable[[Sequence[MicroBatch]], T],
    meter: Meter | None = None,
) -> T:
    """Return what passes over micro-batches make; where memory runs out, all are made again, half as large.

    All processes call this together.

    Args:
        policy: the model.
        rows: the rows that this process computes.
        passes: makes the passes.
        meter: counts how often memory ran out.

    Raises:
        TrainingFailed: Memory ran out for a single row.
        torch.OutOfMemoryError: Memory ran out in a pass that shards make together.
    """
    budget, world, halved = policy.budget, policy.world, 0
    while True:
        micros = micro_batches(policy, rows)
        sizes = [micro.ids_BT.numel() for micro in micros]
        made, failure = None, ""
        try:
            made = passes(micros)
        except torch.OutOfMemoryError as error:
            failure = first_line_of(error)
            if world.sharded and world.size > 1:
                # The others wait for this process in the pass, so it cannot begin again with them.
                error.add_note(f"shards repeat no pass: set tokens_per_micro_batch below {max(sizes)}")
                raise
        # Beyond the handler, because the error holds the tensors of the pass that was broken off.
        if not failure and world.size == 1:
            break
        several = [size for size, micro in zip(sizes, micros, strict=True) if len(micro.rows) > 1]
        if not budget.shrink(failure, max(several, default=0)):
            break
        halved += 1
        if policy.device.type == "cuda":
            torch.cuda.empty_cache()
    if meter is not None and halved:
        meter.add_extremes({"packing/halved/max": torch.tensor(float(halved))})
    return cast("T", made)


def _backward(
    policy: Policy,
    micro: MicroBatch,
    meter: Meter,
    load: ExpertLoad,
    *,
    loss_fn: Callable[[LossInputs], torch.Tensor] | None,
    moved: bool,
) -> tuple[Tensor, list[_RowScores]]:
    """Add the gradient of a micro-batch; return its loss and its rows' scores, which stay on the device."""
    # Layers that are checkpointed run again in the backward pass, and must make the same choices.
    with torch.enable_grad(), policy.replayed(micro):
        with load.watched() as routed:
            logprobs_N, entropy_N = policy.score(micro)
        loss, told = rows_loss(
            micro.rows,
            logprobs_N,
            policy.config,
            entropy_N=entropy_N if policy.config.loss.entropy_coef else entropy_N.detach(),
            loss_fn=loss_fn,
        )
        loss = loss + load.loss(micro, routed, meter)
        # FSDP averages the gradients over the ranks, but the loss is a sum.
        (loss * policy.world.size if policy.world.sharded else loss).backward()
    sizes = [row.num_trained for row in micro.rows]
    scored = list(zip(logprobs_N.detach().split(sizes), entropy_N.detach().split(sizes), strict=True))
    if micro.idle:
        return torch.zeros_like(loss, requires_grad=False), scored
    told(meter, moved=moved)
    meter.add(*_sharing(micro))
    return loss.detach(), scored


def _sharing(micro: MicroBatch) -> tuple[dict[str, float], int]:
    """Return how many tokens lie in a prefix tree, how many the tree saves, and the number of all tokens."""
    tokens = sum(len(row.token_ids) - 1 for row in micro.rows)  # nothing is predicted from the last token
    shared = 0 if micro.tree is None else tokens
    spared = 0 if micro.tree is None else tokens - micro.ids_BT.numel()
    return {"packing/shared_share": float(shared), "packing/tokens_saved": float(spared)}, tokens


@torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
def score_rows(policy: Policy, rows: Sequence[Row]) -> list[torch.Tensor]:
    """Return the log-probabilities of each row's trained tokens under a policy, without gradient."""
    exchange = Exchange(policy.world, rows)

    def passes(micros: Sequence[MicroBatch]) -> dict[Row, torch.Tensor]:
        scored: list[Tensor] = []
        for number, micro in enumerate(micros):
            stop.before_pass()
            log.info("scoring %d of %d passes", number, len(micros))
            with policy.replayed(micro):
                scored.append(policy.score(micro)[0])
        result: dict[Row, torch.Tensor] = {}
        for micro, logprobs_N in zip(micros, scored, strict=True):  # read after the last pass
            parts = logprobs_N.to("cpu").split([row.num_trained for row in micro.rows])
            result |= zip(micro.rows, parts, strict=True)
        return result

    result = _in_memory(policy, exchange.rows, passes)
    return [values_n for (values_n,) in exchange.home([(result[row],) for row in exchange.rows])]


SLACK = 1.05
"""A process keeps its rows up to this multiple of the mean: moved rows lose prefixes that they share."""


def destinations(lengths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, for each row of each process, the process that computes it.

    Rows are dealt longest first. Each stays where it is while that process has no more than its part of the
    tokens, and otherwise goes to the process that has the fewest.

    Args:
        lengths: number of tokens of each row of each process.
    """
    most = SLACK * sum(map(sum, lengths)) / len(lengths)
    loads = [0] * len(lengths)
    chosen = [[home] * len(own) for home, own in enumerate(lengths)]
    order = [(-length, home, index) for home, own in enumerate(lengths) for index, length in enumerate(own)]
    for negative, home, index in sorted(order):
        stays = loads[home] - negative <= most
        target = home if stays else loads.index(min(loads))
        chosen[home][index] = target
        loads[target] -= negative
    return chosen


class _Moved(NamedTuple):
    """A row on its way to another process, or its results on their way back."""

    target: int
    home: int
    place: int
    """Index of the row in its own process."""
    content: Row | tuple[Tensor, ...]


class Exchange:
    """The rows of all processes, dealt out again so that each has about as many tokens.

    All processes make one together.

    Args:
        world: the processes that train together.
        rows: the rows of this process.
    """

    def __init__(self, world: World, rows: Sequence[Row]) -> None:
        self._world, self._own = world, rows
        self.rows = list(rows)
        """The rows that this process computes: those of its own that stay, then those of others."""
        self._stay: list[int] = list(range(len(rows)))
        self._guests: list[_Moved] = []
        if world.size == 1:
            return
        lengths = world.gather([[len(row.token_ids) for row in rows]])
        targets = destinations(lengths)[world.rank]
        leaving = [
            _Moved(target, world.rank, index, rows[index])
            for index, target in enumerate(targets)
            if target != world.rank
        ]
        self._guests = [one for one in world.gather(leaving) if one.target == world.rank]
        self._stay = [index for index, target in enumerate(targets) if target == world.rank]
        guests = [one.content for one in self._guests if isinstance(one.content, Row)]
        self.rows = [rows[index] for index in self._stay] + guests

    def home(self, results: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        """Return the results of this process's own rows, whichever process computed them.

        All processes call this method together.

        Args:
            results: the results of `rows`, in their order.
        """
        returned = dict(zip(self._stay, results, strict=False))
        guests = zip(self._guests, results[len(self._stay) :], strict=True)
        leaving = [
            _Moved(one.home, one.home, one.place, tuple(value.cpu() for value in values))
            for one, values in guests
        ]
        for one in self._world.gather(leaving):
            if one.target == self._world.rank and not isinstance(one.content, Row):
                returned[one.place] = one.content
        return [returned[index] for index in range(len(self._own))]


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
        coefficient = self._policy.config.loss.router_aux_loss_coef
        if passed is None:
            return 0.0
        real_T = to_device(micro.real_T, self._policy.device)
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
