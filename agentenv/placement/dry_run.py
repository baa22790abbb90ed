"""Run micro-batches through the trainer's own code on tensors without memory, and count what they would hold.

The model, its shards and their hooks, the packed row, the chunked LM head and the collection of gradients are
those of a training; only the numbers are missing. A model of equal layers is run with two and with three of
them. What it holds at the two ends of a backward pass grows by the same number of bytes with each layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentenv.core.errors import UsageError
from agentenv.core.faults import first_line_of
from agentenv.core.torch_internals import fake_ranks, fake_tensors, watched_operations
from agentenv.core.transformers_internals import split_layers
from agentenv.placement.shape import ModelShape, empty_model, model_shape, shortened
from agentenv.training.config import GRPOConfig
from agentenv.training.learners.torch.optim import MasterOptimizer
from agentenv.training.learners.torch.packing import MicroBatch, pad_rows
from agentenv.training.learners.torch.passes import ExpertLoad
from agentenv.training.learners.torch.policy import Policy, add_lora, freeze_towers
from agentenv.training.learners.torch.world import World
from agentenv.training.rows import Row

__all__ = ["SAMPLED", "MemoryTracker", "dry_run"]

SAMPLED = 0.25
"""Share of a row that the model sampled; the rest are prompts and observations (an assumption)."""

ATTENTION = "agentenv_dry_run"
_TOP, _MIDDLE, _BOTTOM = "top", "middle", "bottom"
"""Phases of a pass: up to the backward pass of the last layer, then up to that of the first, and the rest."""


def dry_run(
    config: Any, train: GRPOConfig, *, tokens: int, ranks: int = 1, shape: ModelShape | None = None
) -> int:
    """Return the most bytes that the micro-batches of a training would hold at once on one device.

    Weights, masters and the optimiser's state are not counted, and gradients are. A step has two
    micro-batches here; with more it holds no more. Each is a row of which a quarter is trained.

    Args:
        config: transformers config of the model.
        train: options of the training; `dtype` must not be `auto`.
        tokens: length of the row of each micro-batch.
        ranks: number of devices that the model is sharded over; 1 shards nothing.
        shape: sizes of the model, if they are known already.

    Raises:
        UsageError: The model cannot be run without numbers, or this process trains already.
    """
    shape = shape or model_shape(config)
    if shape.layer_kinds > 1 or shape.layers <= 3:
        return max(_run(config, train, tokens, ranks).values())
    two, three = (_run(shortened(config, n), train, tokens, ranks) for n in (2, 3))
    return max(
        peak + (three[phase] - peak) * (shape.layers - 2) for phase, peak in two.items() if phase != _MIDDLE
    )


def _run(config: Any, train: GRPOConfig, tokens: int, ranks: int) -> dict[str, int]:
    """Return the most bytes held in each phase."""
    # The optimiser's states are not counted, so its package need not be here.
    train = replace(train, fsdp=ranks > 1, optim="adamw", torch_compile=False)
    micro = _micro_batch(tokens)
    model = _model(config, train)  # made outside, because peft converts its tensors in place
    with _ranks(ranks) as mesh, fake_tensors():
        try:
            policy = _policy(model, train, mesh)
            optimizer = MasterOptimizer(policy.model.named_parameters(), train)
            tracker = MemoryTracker([*policy.model.parameters(), *policy.model.buffers(), *optimizer.masters])
            _mark_phases(policy, tracker)
            if ranks > 1:  # the first pass of a sharded model also makes what stays
                _pass(policy, micro, tracker, last=True)
                optimizer.zero_grad()
            with tracker.counting():
                for last in (False, True):
                    _pass(policy, micro, tracker, last=last)
        except RuntimeError as error:
            raise UsageError(f"{type(config).__name__} cannot be planned: {first_line_of(error)}") from error
        return tracker.peaks


def _pass(policy: Policy, micro: MicroBatch, tracker: MemoryTracker, *, last: bool) -> None:
    """Make the forward and the backward pass of one micro-batch."""
    tracker.phase = _TOP
    policy.world.reduce_gradients(policy.base, each=policy.reduces_each_pass, last=last)
    load = ExpertLoad(policy, micro.num_tokens)
    with load.watched() as routed:
        logprobs_N, _ = policy.score(micro)
    (logprobs_N.sum() + load.loss(micro, routed)).backward()


def _model(config: Any, train: GRPOConfig) -> Any:
    """Return the model of a training on the meta device."""
    _register_attention()
    model = empty_model(config, torch.float32 if train.dtype == "float32" else torch.bfloat16)
    model.set_attn_implementation(ATTENTION)
    if not train.train_vision:
        freeze_towers(model)
    return model if train.lora is None else add_lora(model, train.lora)


def _policy(model: Any, train: GRPOConfig, mesh: Any) -> Policy:
    _fill(model)
    world = World(torch.device("cpu"))
    world.mesh = mesh
    policy = Policy(model, train, world=world)
    policy.shard()
    return policy


def _fill(model: nn.Module) -> None:
    """Give a model on the meta device tensors of the CPU, whose memory the current mode only pretends."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, one in module.named_parameters(recurse=False):
            if id(one) not in made:
                made[id(one)] = nn.Parameter(torch.empty_like(one, device="cpu"), one.requires_grad)
            setattr(module, name, made[id(one)])
        for name, one in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(one, device="cpu"))


def _register_attention() -> None:
    """Register the plain attention of transformers without the mask that it makes for traced models."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    AttentionInterface.register(ATTENTION, ALL_ATTENTION_FUNCTIONS["sdpa"])
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def _no_mask(*_: object, **__: object) -> None:
    """Return no mask: one row is attended to causally."""


def _mark_phases(policy: Policy, tracker: MemoryTracker) -> None:
    """Let the gradients that enter and leave the layers between the first and the last end a phase."""

    def marking(phase: str) -> Any:
        def watch(_: Any, given: tuple[Any, ...]) -> None:
            def enter(_: Any) -> None:
                tracker.phase = phase

            if given and given[0].requires_grad:
                given[0].register_hook(enter)

        return watch

    layers = split_layers(policy.base)
    if len(layers) < 2:
        return
    layers[-1].register_forward_pre_hook(marking(_MIDDLE))
    layers[1].register_forward_pre_hook(marking(_BOTTOM))


def _micro_batch(tokens: int) -> MicroBatch:
    """Return a micro-batch of one row, whose last quarter is trained."""
    positions_n = torch.arange(tokens - int(tokens * SAMPLED) + 1, tokens + 1)
    nothing_n = torch.zeros(len(positions_n), dtype=torch.float64)
    return pad_rows([Row([0] * (tokens + 1), positions_n, nothing_n, nothing_n, 0, 0)])


@contextmanager
def _ranks(size: int) -> Generator[Any]:
    """Yield a mesh of ranks that exist only in name; None for a single one."""
    if size == 1:
        yield None
        return
    from torch.distributed.device_mesh import init_device_mesh

    if dist.is_initialized():
        raise UsageError(
            "a process that trains with others cannot plan", remedy="plan in a process of its own"
        )
    fake_ranks(size)
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()


class MemoryTracker:
    """Counts the storages that operations make while it counts, until they are freed.

    It sees what PyTorch's allocator would see: on the CPU its peaks are those of the profiler, to the byte.
    Memory that a kernel needs while it runs is not counted.

    Args:
        existing: tensors that are there already and do not count.
    """

    def __init__(self, existing: Iterable[Tensor]) -> None:
        self.held = 0
        """Number of bytes that are held now."""
        self.peaks: dict[str, int] = {}
        """Most bytes held at once, by phase."""
        self.phase = ""
        # Invariant: the sizes of all counted storages that are alive; those of existing ones are 0.
        self._sizes: dict[int, int] = {id(one.untyped_storage()): 0 for one in existing}

    @contextmanager
    def counting(self) -> Generator[None]:
        """Count in this context, also storages that are resized, as FSDP does with gathered weights."""
        kind: Any = torch.UntypedStorage
        resize = kind.resize_

        def counted(storage: Any, size: int) -> Any:
            resized = resize(storage, size)
            key = id(storage)
            if key in self._sizes:
                self._add(size - self._sizes[key])
                self._sizes[key] = size
            return resized

        kind.resize_ = counted
        try:
            with watched_operations(self._see):
                yield
        finally:
            kind.resize_ = resize

    def _see(self, result: Any) -> None:
        """Count the storages of the tensors that an operation returned."""
        if isinstance(result, list | tuple):
            for part in cast("Sequence[Any]", result):
                self._see(part)
        if not isinstance(result, Tensor):
            return
        if isinstance(result, DTensor):  # it claims the bytes of the whole tensor
            with torch.no_grad():
                result = result.to_local()
        # The values of a sparse gradient are a tensor of their own, which an earlier operation made.
        # On the meta device tensors have no memory, unlike the tensors of a mode that pretends it.
        if result.layout == torch.strided and result.device.type != "meta":
            self._count(result.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        # torch keeps one object for a storage as long as the storage lives.
        key = id(storage)
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self._add(self._sizes[key])
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.held -= self._sizes.pop(key, 0)

    def _add(self, size: int) -> None:
        self.held += size
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.held)
