"""The plan of a training: what fits, what does not, and the nearest change that makes it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from agentenv.core.errors import UsageError
from agentenv.placement.machine import Machine
from agentenv.placement.needs import DryRuns, Trained
from agentenv.placement.placement import Placement, place
from agentenv.placement.shape import ModelShape
from agentenv.training.config import GRPOConfig, LoraOptions

__all__ = ["Alternative", "CapacityPlan", "plan_capacity"]

SHORTEST = 1024
"""Shortest context that is proposed."""
MOST_GPUS = 1024


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another setting that fits."""

    change: str
    """What to change, as a user would type it."""
    placement: Placement


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What a training would need, computed and not measured."""

    model: str
    shape: ModelShape
    context: int
    machine: Machine
    config: GRPOConfig
    placement: Placement
    alternatives: list[Alternative] = field(default_factory=list[Alternative])
    """If it does not fit: the nearest options, the longest context and the fewest devices that do."""


def plan_capacity(
    runs: DryRuns, train: GRPOConfig, *, model: str, context: int, machine: Machine
) -> CapacityPlan:
    """Plan a training of a model on a machine.

    Args:
        runs: dry runs of the model, which several plans may share.
        train: options of the training. With `dtype="auto"` they are bfloat16, as on a GPU.
        model: name of the model, for the report.
        context: length of the longest episode in tokens.
        machine: the devices.

    Raises:
        UsageError: The model has no such context, or cannot be planned.
    """
    train = replace(train, dtype="bfloat16") if train.dtype == "auto" else train
    longest = getattr(runs.model.get_text_config(), "max_position_embeddings", None)
    if longest is not None and context > longest:
        raise UsageError(
            f"a context of {context:,} tokens is longer than the {longest:,} of the model",
            remedy=f"plan with --context {longest}",
        )
    planned = place(Trained(runs, train, context, machine.bytes), machine)
    plan = CapacityPlan(model, runs.shape, context, machine, train, planned)
    return plan if planned.fits else replace(plan, alternatives=list(_alternatives(runs, plan)))


def _alternatives(runs: DryRuns, plan: CapacityPlan) -> Iterator[Alternative]:
    """Yield the nearest change of options that fits, of the context and of the number of devices."""
    machine = plan.machine
    for changed in _options(plan.config, machine):
        placement = place(Trained(runs, changed, plan.context, machine.bytes), machine)
        if placement.fits:
            yield Alternative(_words(plan.config, changed).strip(), placement)
            break
    spared = replace(plan.config, gradient_checkpointing=True)
    words = _words(plan.config, spared)
    context = plan.context // 2
    while context >= SHORTEST:
        placement = place(Trained(runs, spared, context, machine.bytes), machine)
        if placement.fits:
            yield Alternative(f"--context {context}{words}", placement)
            break
        context //= 2
    one = Trained(runs, spared, plan.context, machine.bytes)
    gpus = machine.gpus * 2
    while gpus <= MOST_GPUS:
        larger = replace(machine, gpus=gpus)
        placement = place(one, larger)
        if placement.fits:
            yield Alternative(f"--gpus {larger}{words}", placement)
            break
        gpus *= 2


def _options(config: GRPOConfig, machine: Machine) -> Iterator[GRPOConfig]:
    """Yield configs that need less and less memory."""
    changed = config
    several = machine.gpus > 1
    kept = {"reduce_gradients": config.reduce_gradients, "optim": config.optim}
    steps: list[dict[str, Any]] = [
        {"gradient_checkpointing": True},
        # The states of bitsandbytes are not sharded.
        {"reduce_gradients": "micro_batch"} if several else {"optim": "bitsandbytes.optim:AdamW8bit"},
        {**kept, "optimizer_offload": True},
        {"reduce_gradients": "micro_batch"} if several else {},
        {**kept, "optimizer_offload": config.optimizer_offload, "lora": LoraOptions()},
    ]
    for step in steps:
        changed = replace(changed, **step)
        if changed != config:
            yield changed


def _words(config: GRPOConfig, changed: GRPOConfig) -> str:
    """Return the settings that make one config of another."""
    said = ""
    for name in ("gradient_checkpointing", "reduce_gradients", "optim", "optimizer_offload"):
        value = getattr(changed, name)
        if value != getattr(config, name):
            said += f" -o train.{name}={str(value).lower() if isinstance(value, bool) else value}"
    if changed.lora is not None and changed.lora != config.lora:
        said += f" -o train.lora.r={changed.lora.r}"
    return said
