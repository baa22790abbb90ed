"""Divide the devices of a machine between training and sampling, and find the nearest change that fits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from agentenv.core.errors import UsageError
from agentenv.core.fields import by_flat_name
from agentenv.placement.needs import HALF, RESERVED, SERVER_EXTRA, Needs, Trained
from agentenv.placement.sizes import ModelSizes, model_sizes
from agentenv.training.config import GRPOConfig
from agentenv.training.options.lora import LoraOptions

__all__ = ["CapacityPlan", "Machine", "Placement", "plan_capacity"]

ASLEEP = 2_000_000_000
"""Bytes of a device that a server keeps while it sleeps: the CUDA context and captured graphs (a guess)."""
SHORTEST, MOST_GPUS = 1024, 1024
"""Shortest context and largest machine that are proposed."""


@dataclass(frozen=True, slots=True)
class Machine:
    """So many equal devices in one machine."""

    gpus: int
    gigabytes: int
    """Memory of each device in units of 10^9 bytes."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the machine written as `8x80`: eight devices of 80 GB.

        Raises:
            UsageError: The text is not of this form.
        """
        numbers = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if numbers is None:
            raise UsageError(
                f"{text!r} is not a number of GPUs and their memory",
                remedy="write it as 8x80: eight GPUs of 80 GB",
            )
        return cls(int(numbers[1]), int(numbers[2]))

    @property
    def device_bytes(self) -> int:
        """Number of bytes of each device."""
        return self.gigabytes * 10**9

    @property
    def usable(self) -> int:
        """Number of bytes of each device that a training may use."""
        return int(self.device_bytes * (1 - RESERVED))

    def __str__(self) -> str:
        return f"{self.gpus}x{self.gigabytes}"


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices that train and those that sample."""

    trainers: int
    servers: int
    """Number of servers; 0 if the trainer's own device samples."""
    tensor_parallel: int
    """Number of devices of each server."""
    trainer: Needs
    server: Needs | None
    """What each device that samples holds; None if it cannot hold the model with one context."""
    missing: int
    """Number of bytes that a training device would need beyond what it has; 0 or less if it fits."""
    contexts: float
    """Number of full contexts that the KV cache of one server holds."""
    main_memory: int = 0
    """Number of bytes of main memory that each device that trains takes with `optimizer_offload`."""
    asleep: int = 0
    """Number of bytes of main memory that the weights of a server take while it sleeps."""

    @property
    def fits(self) -> bool:
        """Whether every device has room for what it would hold."""
        return self.server is not None and self.missing <= 0


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What a training would need, computed and not measured."""

    model: str
    sizes: ModelSizes
    context: int
    machine: Machine
    config: GRPOConfig
    placement: Placement
    alternatives: Mapping[str, Placement] = field(default_factory=dict[str, Placement])
    """If it does not fit: the nearest options, the longest context and the fewest devices that do, each by
    what a user would type."""


def plan_capacity(
    config: Mapping[str, Any], train: GRPOConfig, *, model: str, context: int, machine: Machine
) -> CapacityPlan:
    """Plan a training of a model on a machine.

    Args:
        config: `config.json` of the model.
        train: options of the training. With `dtype="auto"` they are bfloat16, as on a GPU.
        model: name of the model, for the report.
        context: length of the longest episode in tokens.
        machine: the devices.

    Raises:
        UsageError: The model has no such context, or cannot be planned.
    """
    longest = (config.get("text_config") or config).get("max_position_embeddings") or context
    if context > longest:
        raise UsageError(
            f"a context of {context:,} tokens is longer than the {longest:,} of the model",
            remedy=f"plan with --context {longest}",
        )
    train = replace(train, dtype="bfloat16") if train.dtype == "auto" else train
    one = Trained(model_sizes(config), train, context)
    plan = CapacityPlan(model, one.sizes, context, machine, train, _place(one, machine))
    return plan if plan.placement.fits else replace(plan, alternatives=dict(_alternatives(plan)))


def _place(one: Trained, machine: Machine) -> Placement:
    """Return the most even division of those that fit; the one with the most room if none does."""
    if machine.gpus == 1:
        return _colocated(one, machine)
    copy, usable = one.devices_of_a_copy(1), machine.usable
    sizes = [2**power for power in range(10) if 2**power < machine.gpus]
    size = next((size for size in sizes if one.server(size, usable)), sizes[-1])
    options: list[Placement] = []
    for servers in range(1, (machine.gpus - 1) // size + 1):
        trainers = machine.gpus - servers * size
        if trainers % copy == 0:
            server, trainer = one.server(size, usable), one.trainer(trainers, machine.device_bytes)
            contexts = 0.0 if server is None else server.parts["KV cache"] * size / one.cache
            held, missing = one.main_memory(trainers), trainer.total - usable
            options.append(Placement(trainers, servers, size, trainer, server, missing, contexts, held))
    if not options:
        raise UsageError(
            f"fsdp={copy} needs {copy} devices that train, or a multiple of it, and others that "
            f"sample, which {machine} cannot be divided into",
            remedy="set fsdp to a smaller number or to true, or name more devices",
        )
    # Half of the devices each: phases that follow each other take as long, and so do those at the same time.
    return min(options, key=lambda option: (max(0, option.missing), abs(2 * option.trainers - machine.gpus)))


def _colocated(one: Trained, machine: Machine) -> Placement:
    """Return a single device that samples while it does not train, from the trainer's own weights.

    With `engine="vllm:..."` a server has its own weights. While it sleeps (`engine.sleep`) they are dropped,
    or wait in main memory for adapters. The trainer then gives back what its passes took.
    """
    served = one.config.engine.startswith("vllm:")
    trainer = one.trainer(1, machine.device_bytes, {"server asleep": ASLEEP} if served else {})
    parts = {"trainer": sum(trainer.parts[name] for name in ("weights", "masters", "optimizer", "reference"))}
    weights = HALF * one.sizes.parameters
    if served:
        parts |= {"weights": weights, "other": SERVER_EXTRA}
    cache = machine.usable - sum(parts.values())
    contexts = max(0.0, cache / one.cache)
    server = Needs({**parts, "KV cache": cache}) if contexts >= 1 else None
    missing, asleep = trainer.total - machine.usable, weights if served and one.config.lora else 0
    return Placement(1, 0, 1, trainer, server, missing, contexts, one.main_memory(1), asleep)


def _alternatives(plan: CapacityPlan) -> Iterator[tuple[str, Placement]]:
    """Yield the nearest change of options that fits, of the context and of the number of devices."""
    spared, machine = replace(plan.config, gradient_checkpointing=True), plan.machine
    contexts = [plan.context >> power for power in range(1, 20) if plan.context >> power >= SHORTEST]
    larger = [machine.gpus << power for power in range(1, 11) if machine.gpus << power <= MOST_GPUS]
    ways = (
        [("", changed, plan.context, machine) for changed in _options(plan.config, machine)],
        [(f"--context {context} ", spared, context, machine) for context in contexts],
        [
            (f"--gpus {gpus}x{machine.gigabytes} ", spared, plan.context, replace(machine, gpus=gpus))
            for gpus in larger
        ],
    )
    for way in ways:
        for words, changed, context, placed in way:
            placement = _place(Trained(plan.sizes, changed, context), placed)
            if placement.fits:
                yield (words + _words(plan.config, changed)).strip(), placement
                break


def _options(config: GRPOConfig, machine: Machine) -> Iterator[GRPOConfig]:
    """Yield configs that need less and less memory."""
    spared = replace(config, gradient_checkpointing=True)
    offloaded = replace(spared, optimizer_offload=True)
    changed = [spared, replace(spared, optim="bitsandbytes.optim:AdamW8bit"), offloaded]
    if machine.gpus > 1:  # the states of bitsandbytes are not sharded
        changed = [spared, offloaded]
    yield from (one for one in [*changed, replace(spared, lora=LoraOptions())] if one != config)


def _words(config: GRPOConfig, changed: GRPOConfig) -> str:
    """Return the settings that make one config of another."""
    before, after = by_flat_name(config), by_flat_name(changed)
    names = ("gradient_checkpointing", "optim", "optimizer_offload")
    pairs = [(name, after[name]) for name in names if after[name] != before[name]]
    if changed.lora is not None and changed.lora != config.lora:
        pairs.append(("lora.r", changed.lora.r))
    return " ".join(f"-o train.{name}={str(one).lower() if one is True else one}" for name, one in pairs)
