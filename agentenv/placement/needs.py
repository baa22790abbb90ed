"""What the devices that train and the devices that sample would hold, part by part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch

from agentenv.placement.dry_run import SAMPLED, dry_run
from agentenv.placement.shape import ModelShape, empty_model, model_shape
from agentenv.training.config import GRPOConfig
from agentenv.training.learners.torch.budget import FIRST_TOKENS
from agentenv.training.learners.torch.logprob import CHUNK, KEPT_BYTES
from agentenv.training.learners.torch.policy import add_lora, freeze_towers, reduces_each_pass
from agentenv.training.unread import whole_reason

__all__ = [
    "DryRuns",
    "Needs",
    "Trained",
    "devices_of_a_copy",
    "loading_memory",
    "main_memory",
    "server_needs",
    "trainer_needs",
]

HALF, WIDE = 2, 4
"""Bytes of a bfloat16 and of a float32 number."""
SERVER_EXTRA = 3_000_000_000
"""Bytes that a server needs beside weights and KV cache: activations and captured graphs (a common value)."""

ASLEEP = 2_000_000_000
"""Bytes of a device that a server keeps while it sleeps: the CUDA context and captured graphs (a guess)."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that one device holds at its worst moment, by part."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Number of bytes of all parts."""
        return sum(self.parts.values())


class DryRuns:
    """Dry runs of one model, each of which is made once.

    Args:
        model: transformers config of the model.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.shape = model_shape(model)
        self._peaks: dict[tuple[GRPOConfig, int, int], int] = {}
        self.loaded_whole = cache(self._loaded_whole)
        """Whether each process loads the whole model before it is sharded, in a number format."""

    def peak(self, config: GRPOConfig, context: int, ranks: int) -> int:
        """Return the most bytes of the micro-batches on a whole device (1 rank) or on one of two."""
        tokens = max(context, config.tokens_per_micro_batch or FIRST_TOKENS)
        known = (config, tokens, ranks)
        if known not in self._peaks:
            self._peaks[known] = dry_run(self.model, config, tokens=tokens, ranks=ranks, shape=self.shape)
        return self._peaks[known]

    def _loaded_whole(self, dtype: torch.dtype) -> bool:
        return bool(whole_reason(empty_model(self.model, dtype), dtype))

    def trained(self, config: GRPOConfig) -> int:
        """Return the number of trained parameters."""
        model = empty_model(self.model, torch.bfloat16)
        if config.lora is not None:
            model = add_lora(model, config.lora)
        elif not config.train_vision:
            freeze_towers(model)
        return sum(one.numel() for one in model.parameters() if one.requires_grad)


@dataclass(frozen=True)
class Trained:
    """A model with the options of its training."""

    runs: DryRuns
    config: GRPOConfig
    context: int
    device_bytes: int
    """Number of bytes of a device, on which `reduce_gradients="auto"` depends."""

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        return self.runs.shape

    @cached_property
    def trained(self) -> int:
        """Number of trained parameters."""
        return self.runs.trained(self.config)

    @property
    def weights(self) -> int:
        """Number of bytes of the whole model in the format of the training."""
        return self._dtype.itemsize * self.shape.parameters

    @property
    def loaded_whole(self) -> bool:
        """Whether each process loads the whole model before it is sharded."""
        return self.runs.loaded_whole(self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32 if self.config.dtype == "float32" else torch.bfloat16

    def gradients(self, ranks: int) -> int:
        """Return the bytes of the summed gradients on one of so many devices."""
        return WIDE * self.trained // ranks

    def passes(self, ranks: int) -> int:
        """Return the most bytes of the micro-batches, gradients included, on one of so many devices.

        Of what one of two devices holds, only its share of the summed gradients shrinks with more devices.
        """
        if ranks == 1:
            return self.runs.peak(self.config, self.context, 1)
        config = self.config
        if config.reduce_gradients == "auto":
            each = reduces_each_pass(self.trained, self.device_bytes)
            config = replace(config, reduce_gradients="micro_batch" if each else "step")
        return self.runs.peak(config, self.context, 2) - self.gradients(2) + self.gradients(ranks)


def trainer_needs(one: Trained, ranks: int) -> Needs:
    """Return what each of the devices that train holds when it holds most."""
    config = one.config
    ranks = devices_of_a_copy(config, ranks)
    width = WIDE if config.dtype == "float32" else HALF
    peak, gradients = one.passes(ranks), one.gradients(ranks)
    # The optimiser computes the roots of all its second moments at once, after the passes.
    masters, state, step = (
        (0, 0, 0) if config.optimizer_offload else (WIDE * (width != WIDE), _state_bytes(config), WIDE)
    )
    logits = _logits(one)
    parts = {
        "weights": one.weights // ranks,
        "masters": masters * one.trained // ranks,
        "optimizer": state * one.trained // ranks,
        "gradients": gradients,
        "reference": one.weights // ranks if config.beta and config.lora is None else 0,
        "logits": min(logits, peak - gradients),
        "activations": max(0, peak - gradients - logits),
    }
    extra = step * one.trained // ranks - parts["logits"] - parts["activations"]
    parts["optimizer step"] = max(0, extra)
    if ranks > 1 and one.loaded_whole:
        parts["loading"] = max(0, one.weights - sum(parts.values()))
    return Needs(parts)


def loading_memory(one: Trained, ranks: int) -> int:
    """Return the bytes of main memory that each of the devices that train takes while the model is loaded.

    A model passes through main memory whole, unless each process reads its own part of one weight at a time.
    """
    whole = devices_of_a_copy(one.config, ranks) == 1 or one.loaded_whole
    return one.weights if whole else 0


def main_memory(one: Trained, ranks: int) -> int:
    """Return the bytes of main memory that each of the devices that train takes with `optimizer_offload`.

    During a step these are masters, states and the gradients that were moved.
    """
    if not one.config.optimizer_offload:
        return 0
    return (2 * WIDE + _state_bytes(one.config)) * one.trained // devices_of_a_copy(one.config, ranks)


def devices_of_a_copy(config: GRPOConfig, ranks: int) -> int:
    """Return over how many of the devices that train a copy of the model is sharded."""
    # A device of another copy takes no part of this one's memory.
    return ranks if isinstance(config.fsdp, bool) else config.shard_size(ranks)


def _state_bytes(config: GRPOConfig) -> int:
    """Return the bytes that the optimiser keeps for each trained parameter."""
    return HALF if "8bit" in config.optim.lower() else 2 * WIDE


def _logits(one: Trained) -> int:
    """Return the bytes of logits, kept probabilities and the head's gradient, which chunks bound."""
    row = WIDE * one.shape.vocab_size
    tokens = max(one.context, one.config.tokens_per_micro_batch or FIRST_TOKENS)
    kept = min(int(tokens * SAMPLED) * row, KEPT_BYTES)
    head = 0 if one.config.lora is not None else WIDE * one.shape.head
    return kept + 2 * CHUNK * row + head


def server_needs(shape: ModelShape, context: int, usable: int, tensor_parallel: int) -> Needs | None:
    """Return what each device of a server holds; None if not even one context fits.

    The KV cache takes what is left.
    """
    weights = HALF * shape.parameters // tensor_parallel
    left = usable - weights - SERVER_EXTRA
    cache = HALF * shape.cache_values * context // tensor_parallel
    return Needs({"weights": weights, "KV cache": left, "other": SERVER_EXTRA}) if left >= cache else None
