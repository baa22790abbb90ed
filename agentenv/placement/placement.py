"""Divide the devices of a machine between training and sampling, and estimate the seconds of a step."""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.core.errors import UsageError
from agentenv.placement.dry_run import SAMPLED
from agentenv.placement.machine import (
    DISK_BYTES_PER_S,
    LINK_BYTES_PER_S,
    MAIN_MEMORY_BYTES_PER_S,
    Machine,
)
from agentenv.placement.needs import (
    ASLEEP,
    HALF,
    SERVER_EXTRA,
    WIDE,
    Needs,
    Trained,
    devices_of_a_copy,
    loading_memory,
    main_memory,
    server_needs,
    trainer_needs,
)

__all__ = ["Placement", "Seconds", "place"]

MOST_AT_ONCE = 256
"""Largest number of episodes that a server samples at once, the default of `engine.concurrency`."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Expected seconds of the phases of a step whose episodes all fill the context."""

    sampling: float
    scoring: float
    update: float
    sync: float

    @property
    def total(self) -> float:
        """Seconds of a step whose phases follow each other."""
        return self.sampling + self.scoring + self.update + self.sync


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
    usable: int
    contexts: float
    """Number of full contexts that the KV cache of one server holds."""
    seconds: Seconds | None
    main_memory: int = 0
    """Number of bytes of main memory that each device that trains takes with `optimizer_offload`."""
    loading: int = 0
    """Number of bytes of main memory that each device that trains takes while the model is loaded."""
    asleep: int = 0
    """Number of bytes of main memory that the weights of a server take while it sleeps."""

    @property
    def fits(self) -> bool:
        """Whether every device has room for what it would hold."""
        return self.server is not None and self.trainer.total <= self.usable

    @property
    def missing(self) -> int:
        """Number of bytes that a training device would need beyond what it has; 0 or less if it fits."""
        return self.trainer.total - self.usable


def place(one: Trained, machine: Machine) -> Placement:
    """Return the division of the devices with the fewest expected seconds for a step, of those that fit.

    If none fits, it is the one with the most devices for training.

    Raises:
        UsageError: No division leaves a number of devices for training that `fsdp` divides.
    """
    if machine.gpus == 1:
        return _colocated(one, machine)
    together = 1 if isinstance(one.config.fsdp, bool) else one.config.fsdp
    options = [
        _divided(one, machine, servers * size, size)
        for size in _server_sizes(one, machine)
        for servers in range(1, (machine.gpus - 1) // size + 1)
        if (machine.gpus - servers * size) % together == 0
    ]
    if not options:
        raise UsageError(
            f"fsdp={together} needs {together} devices that train, or a multiple of it, and others that "
            f"sample, which {machine} cannot be divided into",
            remedy="set fsdp to a smaller number or to true, or name more devices",
        )
    fitting = [option for option in options if option.fits and option.seconds is not None]
    if not fitting:
        return min(options, key=lambda option: (option.server is None, option.trainer.total))
    return min(fitting, key=lambda option: option.seconds.total if option.seconds else 0.0)


def _server_sizes(one: Trained, machine: Machine) -> list[int]:
    """Return the smallest number of devices, a power of two, on which a server holds model and context."""
    sizes = [2**power for power in range(10) if 2**power < machine.gpus]
    able = [size for size in sizes if server_needs(one.shape, one.context, machine.usable, size)]
    return able[:1] or sizes[-1:]


def _colocated(one: Trained, machine: Machine) -> Placement:
    """Return a single device that samples while it does not train, from the trainer's own weights.

    With `engine="vllm:..."` a server has its own weights, which wait in main memory while it sleeps
    (`engine.sleep`). The trainer then gives back what its passes took.
    """
    trainer, weights = trainer_needs(one, 1), 0
    stays = sum(trainer.parts[name] for name in ("weights", "masters", "optimizer", "reference"))
    parts = {"trainer": stays}
    if one.config.engine.startswith("vllm:"):
        weights = HALF * one.shape.parameters
        parts |= {"weights": weights, "other": SERVER_EXTRA}
        trainer = Needs(trainer.parts | {"server asleep": ASLEEP})
    cache = machine.usable - sum(parts.values())
    full = HALF * one.shape.cache_values * one.context
    server = Needs({**parts, "KV cache": cache}) if cache >= full else None
    contexts = max(0.0, cache / full)
    seconds = _seconds(one, machine, 1, 1, 1, contexts) if server is not None else None
    held, loading = main_memory(one, 1), loading_memory(one, 1)
    return Placement(
        1, 0, 1, trainer, server, machine.usable, contexts, seconds, held, loading, asleep=weights
    )


def _divided(one: Trained, machine: Machine, sampling: int, size: int) -> Placement:
    trainers = machine.gpus - sampling
    server = server_needs(one.shape, one.context, machine.usable, size)
    contexts = 0.0
    if server is not None:
        contexts = server.parts["KV cache"] * size / (HALF * one.shape.cache_values * one.context)
    seconds = None if server is None else _seconds(one, machine, trainers, sampling // size, size, contexts)
    trainer = trainer_needs(one, trainers)
    held = main_memory(one, trainers)
    return Placement(
        trainers,
        sampling // size,
        size,
        trainer,
        server,
        machine.usable,
        contexts,
        seconds,
        held,
        loading_memory(one, trainers),
    )


def _seconds(  # noqa: PLR0917 - the parts of a placement
    one: Trained, machine: Machine, trainers: int, servers: int, size: int, contexts: float
) -> Seconds:
    """Estimate the seconds of a step. Traffic between devices is taken to be hidden behind products."""
    shape, config = one.shape, one.config
    episodes = config.groups_per_step * config.num_generations
    tokens = episodes * one.context
    # A product has two operations for each parameter and token, and attention two for each of its two
    # products, each value and each of the tokens before, which are half a context on average.
    forward = 2 * shape.active + 2 * shape.layers * shape.attention_width * one.context
    sampled = SAMPLED * tokens / servers
    # Episodes have half of their context on average, so twice as many are live as full ones would fit.
    live = max(1.0, min(episodes / servers, 2 * contexts, MOST_AT_ONCE))
    touched = min(shape.parameters, shape.active * live)  # many tokens together use all experts
    read = HALF * (touched + live * shape.cache_values * one.context / 2) / size
    step = max(read / machine.bytes_per_s, live * forward / (size * machine.products_per_s))
    prefill = (1 - SAMPLED) * tokens / servers * forward / (size * machine.products_per_s)
    passes = 2.0 if config.lora is not None else 3.0  # frozen weights have no gradient
    passes += config.gradient_checkpointing
    scored = bool(config.beta) + (
        config.proximal == "recompute" and config.num_iterations * config.num_minibatches > 1
    )
    train = tokens * forward / (trainers * machine.products_per_s)
    moved = HALF * (one.trained if config.lora is not None else shape.parameters)
    return Seconds(
        sampling=sampled / live * step + prefill,
        scoring=scored * train,
        update=config.num_iterations * passes * train + _offloaded_steps(one, trainers),
        sync=0.0 if machine.gpus == 1 else max(1, servers) * moved / DISK_BYTES_PER_S,
    )


def _offloaded_steps(one: Trained, trainers: int) -> float:
    """Estimate the seconds that steps of the optimiser in main memory add, while the devices wait."""
    config = one.config
    if not config.optimizer_offload:
        return 0.0
    share = one.trained / devices_of_a_copy(config, trainers)
    moved = (WIDE + HALF) * share
    # Gradient, master and both moments are read, and the latter three are written.
    touched = 7 * WIDE * share * trainers
    steps = config.num_iterations * config.num_minibatches
    return steps * (moved / LINK_BYTES_PER_S + touched / MAIN_MEMORY_BYTES_PER_S)
