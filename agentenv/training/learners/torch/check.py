"""Find out what is exact for a model when training starts, by gradients of a few short rows.

The truth are the gradients of padded rows through the model's own logits. Compared with them are compiled
layers, the LM head in chunks, and packed rows; what differs is not used. The comparisons are made on
gradients, because a leak between rows may hardly change the loss (2e-5 on convolution layers) and yet change
the gradients by a fifth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from agentenv.core.errors import UsageError
from agentenv.core.faults import first_line_of
from agentenv.training.learners.torch.attention import BLOCK, Way
from agentenv.training.learners.torch.heads import HeadWay
from agentenv.training.learners.torch.packing import MicroBatch, pack_rows, pad_rows
from agentenv.training.learners.torch.shards import local, reshard
from agentenv.training.learners.torch.world import World
from agentenv.training.rows import Row

__all__ = ["Scorer", "difference", "find_inexact", "probe_gradients", "probe_rows"]

MAX_CHECK_PARAMETERS = 400_000_000
"""A low-precision model of up to this size is checked as a float32 copy, too."""
EXACT = 1e-3
"""Relative difference of gradients that float32 explains."""
MOST_ROUNDING = 0.15
"""Relative difference of gradients that rounding in a lower precision may explain: for packed rows of dense
models and mixtures of experts, 0.5 % to 10 % were measured. A wrong mask may change them by a fifth."""
MEMBERS = 3
MOST_COMPARED = 400_000_000
"""Number of weights whose gradients are compared, which bounds the memory of a check."""
SAMPLED = 1024
"""Number of values of each gradient that a rank compares if the model is sharded."""
MOST_LEAK = 0.01
"""Largest relative change of a row's gradients that other tokens in its neighbours may cause, in any number
format. What is not visible contributes exact zeros: none at all was measured on the CPU, also with a mixture
of experts. The rest is room for kernels of other devices that sum in no fixed order."""


HEADS = {
    "own": "the LM head is not one plain matrix, so the model computes the logits itself",
    "whole": "the LM head by itself gives other logits, so the model computes those of all positions, which "
    "takes memory for each of them",
}


class Scorer(Protocol):
    """The part of a policy that is checked."""

    model: Any
    base: Any
    world: World
    way: Way
    head_way: HeadWay
    """How logits are computed."""
    pack_reason: str
    """Why rows are not packed; empty if they are."""
    max_length: int | None
    vocab_size: int

    def score(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of the trained tokens."""
        ...

    def copy(self, dtype: torch.dtype | None = None) -> Scorer:
        """Return a policy with a copy of the weights, in another number format if one is named."""
        ...


def find_inexact(policy: Scorer) -> list[str]:
    """Switch off what is not exact for a policy.

    Returns:
        Sentences that name what is not used, and why; empty if everything is exact.

    Raises:
        UsageError: The numbers of a row depend on the longest row of a forward pass.
    """
    rows, findings = probe_rows(policy.vocab_size), list[str]()
    for probe, tolerance in _probes(policy):
        # An earlier probe may have refused.
        probe.head_way, probe.pack_reason = policy.head_way, policy.pack_reason
        wanted, probe.head_way = probe.head_way, "whole"
        truth = probe_gradients(probe, pad_rows(rows))
        probe.head_way = _head_way(probe, wanted, rows, truth, tolerance)
        if probe.head_way != wanted:
            findings.append(HEADS[probe.head_way])
        if not probe.pack_reason:
            probe.pack_reason = _tried(probe, partial(_pack_reason, probe, rows, truth, tolerance))
        policy.head_way, policy.pack_reason = probe.head_way, probe.pack_reason
        _refuse_dependence(probe, rows, tolerance)  # last, because a row alone may be attended over as a pack
    if policy.pack_reason:
        findings.append(f"rows are padded, not packed: {policy.pack_reason}")
    return findings


def _probes(policy: Scorer) -> Iterator[tuple[Scorer, float]]:
    """Yield the policies to check, each with the relative difference that its number format explains.

    A model of low precision is checked as a float32 copy, which shows small errors, and as it is, because
    the kernels of its own format may be at fault: SDPA with a mask in bfloat16 on the CPU (torch 2.13)
    returns gradients of SmolLM2 that are off by 0.9, and in float32 by 3e-5.
    """
    size = sum(parameter.numel() for parameter in policy.model.parameters())
    if next(policy.model.parameters()).dtype in (torch.float32, torch.float64):
        yield policy, EXACT
        return
    if size <= MAX_CHECK_PARAMETERS:
        yield policy.copy(torch.float32), EXACT
    yield policy, MOST_ROUNDING


def probe_rows(vocab_size: int, *, groups: int = 2, length: int = 0) -> list[Row]:
    """Return groups of rows, each with a common prefix, and with a gap in their trained tokens.

    Args:
        vocab_size: number of different tokens.
        groups: number of groups.
        length: number of tokens by which both a prefix and the rest of a row are longer than a few tokens.
    """
    generator = torch.Generator().manual_seed(0)
    top = min(vocab_size, 1000)

    def draw(count: int) -> list[int]:
        return torch.randint(0, top, (count,), generator=generator).tolist()

    rows: list[Row] = []
    for group in range(groups):
        prompt, (own,) = draw(7 + group + length), draw(1)
        for member in range(MEMBERS):
            # The first token after the prompt is different in each row, so rows share exactly the prompt.
            ids = [*prompt, (own + member) % top, *draw(5 + member + length)]
            positions_n = torch.tensor([p for p in range(len(prompt), len(ids)) if p != len(prompt) + 2])
            weights_n = torch.randn(positions_n.shape, generator=generator)
            rows.append(Row(ids, positions_n, torch.zeros_like(weights_n), weights_n, member, group))
    return rows


def _tried(probe: Scorer, compare: Callable[[], str]) -> str:
    """Return what a comparison says, or the error that broke it off; all processes get the same answer."""
    try:
        reason = compare()
    except Exception as error:  # noqa: BLE001 - models and compilers raise what they like
        reshard(probe.model)  # the pass was broken off where some layers were whole
        reason = f"{type(error).__name__}: {first_line_of(error)}"
    return probe.world.agreed(reason)


def _head_way(
    probe: Scorer, wanted: HeadWay, rows: Sequence[Row], truth: Sequence[Tensor | None], tolerance: float
) -> HeadWay:
    """Return the first way of the head, from the wanted one on, that is exact."""

    def compare() -> str:
        gap = difference(probe_gradients(probe, pad_rows(rows)), truth, probe.world)
        return "" if gap <= tolerance else f"gradients are off by {gap:.1e} (relative)"

    ways: tuple[HeadWay, ...] = ("matrix", "own", "whole")
    for way in ways[ways.index(wanted) : -1]:
        probe.head_way = way
        if not _tried(probe, compare):
            return way
    return "whole"


def _pack_reason(probe: Scorer, rows: Sequence[Row], truth: Sequence[Tensor | None], tolerance: float) -> str:
    """Return why packs are not exact; empty if they are."""
    gap = difference(probe_gradients(probe, pack_rows(rows)), truth, probe.world)
    if not gap <= tolerance:
        return f"packed gradients are off by {gap:.1e} (relative)"
    leak = _leak(probe, rows)
    if not leak <= MOST_LEAK:
        return f"the rows packed beside a row change its gradients by {leak:.1e} (relative)"
    fits = probe.max_length is None or probe.max_length > 3 * BLOCK
    if probe.way == "flex" and fits:
        # Short rows fit into one block, in which every pair is looked at.
        rows = probe_rows(probe.vocab_size, groups=1, length=BLOCK)
        whole = probe_gradients(probe, pad_rows(rows))
        gap = difference(probe_gradients(probe, pack_rows(rows)), whole, probe.world)
        if not gap <= tolerance:
            return f"packed gradients of longer rows are off by {gap:.1e} (relative)"
    return ""


def probe_gradients(probe: Scorer, micro: MicroBatch) -> tuple[Tensor | None, ...]:
    """Return the gradients of the rows' weighted log-probabilities.

    A parameter that had no part in them, such as an expert that no token chose, has None.
    """
    with torch.enable_grad():
        logprobs_N, _ = probe.score(micro)
        weights_N = torch.cat([row.advantages_n for row in micro.rows]).to(logprobs_N)
        loss = (weights_N * logprobs_N).sum()
        if probe.world.sharded:
            return _sharded_gradients(probe.model, loss)
        return torch.autograd.grad(loss, _compared(probe.model), allow_unused=True)


def _sharded_gradients(model: Any, loss: Tensor) -> tuple[Tensor | None, ...]:
    """Return a sample of this rank's part of each gradient.

    Each gradient is freed as soon as it is sampled, so that a check needs no memory for those of all layers.
    """
    parameters = [one for one in model.parameters() if one.requires_grad]
    kept: dict[Tensor, Tensor] = {}

    def keep(parameter: Tensor) -> None:
        assert parameter.grad is not None
        flat = local(parameter.grad).reshape(-1)
        kept[parameter] = flat[:: -(-len(flat) // SAMPLED) or 1].clone()
        parameter.grad = None

    hooks = [one.register_post_accumulate_grad_hook(keep) for one in parameters]
    try:
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(kept.get(one) for one in parameters)


def _compared(model: Any) -> list[Tensor]:
    """Return the trained parameters to compare, without the largest ones of a large model.

    A wrong activation changes the gradients of all parameters below it, so a part of them shows it.
    """
    parameters = sorted((one for one in model.parameters() if one.requires_grad), key=Tensor.numel)
    sizes = accumulate(one.numel() for one in parameters)
    return [one for one, size in zip(parameters, sizes, strict=True) if size <= MOST_COMPARED] or parameters[
        :1
    ]


def difference(
    grads: Sequence[Tensor | None], truth: Sequence[Tensor | None], world: World | None = None
) -> float:
    """Return the distance of gradients from the true ones, relative to their norm; None is zero.

    Of sharded gradients every rank passes its own part, and all get the same number.
    """
    gap = sum(
        _square(b if a is None else a if b is None else a - b) for a, b in zip(grads, truth, strict=True)
    )
    size = sum(map(_square, truth))
    if world is not None and world.sharded:
        gap, size = world.total(gap), world.total(size)
    return (gap / size) ** 0.5 if size else float(gap > 0)


def _square(grad: Tensor | None) -> float:
    return 0.0 if grad is None else float(grad.double().square().sum())


def _leak(probe: Scorer, rows: Sequence[Row]) -> float:
    """Return how far other tokens in the other rows of a pack move the gradients of its last row.

    Both packs have the same layout, so rounding is the same and even a small leak is seen in any format.
    """
    last = max(rows, key=lambda row: row.token_ids)
    before, after = (
        [row if row is last else _silent(row, shift, probe.vocab_size) for row in rows] for shift in (0, 1)
    )
    moved, still = (probe_gradients(probe, pack_rows(one)) for one in (after, before))
    return difference(moved, still, probe.world)


def _silent(row: Row, shift: int, vocab_size: int) -> Row:
    """Return a row without weight in the loss, whose tokens after its first own one are shifted."""
    own = int(row.positions_n[0]) + 1
    ids = row.token_ids[:own] + [(token + shift) % vocab_size for token in row.token_ids[own:]]
    return replace(row, token_ids=ids, advantages_n=torch.zeros_like(row.advantages_n))


def _refuse_dependence(probe: Scorer, rows: Sequence[Row], tolerance: float) -> None:
    """Refuse a model whose rows are computed otherwise beside a row at the end of the context.

    A model whose pass fails with positions of its own has none to depend on.

    Raises:
        UsageError: The numbers of a row change.
    """
    limit = probe.max_length
    if limit is None or limit < 16:
        return
    depends = False

    def compare() -> str:
        nonlocal depends
        depends = _depends_on_longest(probe, rows, limit, tolerance)
        return ""

    if not _tried(probe, compare) and depends:
        raise UsageError(
            f"the numbers of a row in {type(probe.base).__name__} depend on the longest row of the "
            "forward pass, so packed, padded and sampled rows would differ",
            remedy="load the model through GRPOTrainer or hf:, which fix its position frequencies",
        )


@torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
def _depends_on_longest(probe: Scorer, rows: Sequence[Row], limit: int, tolerance: float) -> bool:
    """Return whether the numbers of a row change if a row at the end of the context is beside it.

    The second row has few tokens at the last positions, because models select by positions what they compute.
    """
    near, far = (
        replace(row, token_ids=row.token_ids[:8], positions_n=torch.arange(1, 8)) for row in rows[:2]
    )
    positions_BT = torch.stack([torch.arange(7), torch.arange(limit - 7, limit)])
    both, alone = pad_rows([near, far]), pad_rows([near])
    both.positions_BT, alone.positions_BT = positions_BT, positions_BT[:1]
    ours, truth = probe.score(both)[0][:7], probe.score(alone)[0]
    return not float((ours - truth).abs().max()) <= tolerance * float(truth.abs().max())
