"""What each device that trains and each that samples would hold, part by part.

Each term of these formulas is a tensor that the trainer or a model of transformers keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from agentenv.placement.sizes import ModelSizes
from agentenv.training.config import GRPOConfig
from agentenv.training.learners.pass_sizes import (
    CHUNK_ON_CUDA,
    KEPT_BYTES,
    first_tokens,
    reduces_each_pass,
)

__all__ = ["HALF", "RESERVED", "SERVER_EXTRA", "Needs", "Trained"]

HALF, WIDE = 2, 4
"""Bytes of a bfloat16 and of a float32 number."""
SAMPLED = 0.25
"""Share of a row that the model sampled; the rest are prompts and observations (an assumption)."""
SERVER_EXTRA = 3_000_000_000
"""Bytes that a server needs beside weights and KV cache: activations and captured graphs (a common value)."""
RESERVED = 0.08
"""Share of a device's memory that is left to the driver, kernels, communication and fragments."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that one device holds at its worst moment, by part."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Number of bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Trained:
    """A model with the options of its training and the length of the longest episode."""

    sizes: ModelSizes
    config: GRPOConfig
    context: int

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return self.sizes.trained(self.config.lora, vision=self.config.train_vision)

    @property
    def cache(self) -> int:
        """Bytes of the keys and values of a full context."""
        return HALF * self.sizes.cache_values * self.context

    def devices_of_a_copy(self, ranks: int) -> int:
        """Return over how many of the devices that train a copy of the model is sharded."""
        return ranks if isinstance(self.config.fsdp, bool) else self.config.fsdp

    def main_memory(self, ranks: int) -> int:
        """Return the bytes of main memory that `optimizer_offload` takes for each device that trains."""
        held = (2 * WIDE + self._state) * self.trained // self.devices_of_a_copy(ranks)
        return held if self.config.optimizer.optimizer_offload else 0

    def trainer(
        self, ranks: int, device_bytes: int, others: Mapping[str, int] = MappingProxyType({})
    ) -> Needs:
        """Return what each of the devices that train holds at the worst moment of its last pass.

        As in a training, a micro-batch has half as many tokens where more would not fit, down to one row.

        Args:
            ranks: number of devices that train.
            device_bytes: memory of each.
            others: what others hold on the device meanwhile.
        """
        ranks = self.devices_of_a_copy(ranks)
        repeats = ranks == 1
        tokens = self.config.tokens_per_micro_batch or first_tokens(device_bytes if repeats else None)
        needs = self._holding(max(self.context, tokens), ranks, device_bytes, others)
        while repeats and tokens > self.context and needs.total > device_bytes * (1 - RESERVED):
            tokens //= 2
            needs = self._holding(max(self.context, tokens), ranks, device_bytes, others)
        return needs

    def _holding(self, tokens: int, ranks: int, device_bytes: int, others: Mapping[str, int]) -> Needs:
        """Return what a device holds in passes of so many tokens, with a copy on so many ranks."""
        config, trained = self.config, self.trained
        weights = self._width * self.sizes.parameters // ranks
        on_device = not config.optimizer.optimizer_offload
        # Without a sum in each pass, a device keeps its own gradients of all weights until the last one.
        kept_on = ranks if reduces_each_pass(trained, device_bytes) else 1
        return Needs(
            {
                "weights": weights,
                "masters": on_device * (self._width == HALF) * WIDE * trained // ranks,
                "optimizer": on_device * self._state * trained // ranks,
                "gradients": WIDE * trained // kept_on,
                "reference": weights if config.loss.has_kl and config.lora is None else 0,
                "gathered": self._gathered if ranks > 1 else 0,
                "activations": self._activations(tokens),
                **others,
            }
        )

    def server(self, devices: int, usable: int) -> Needs | None:
        """Return what each device of a server holds, the cache what is left; None if no context fits."""
        weights = HALF * self.sizes.parameters // devices
        left = usable - weights - SERVER_EXTRA
        parts = {"weights": weights, "KV cache": left, "other": SERVER_EXTRA}
        return Needs(parts) if left * devices >= self.cache else None

    @property
    def _width(self) -> int:
        return WIDE if self.config.dtype == "float32" else HALF

    @property
    def _state(self) -> int:
        """Bytes that the optimiser keeps for each trained parameter."""
        return HALF if "8bit" in self.config.optimizer.optim.lower() else 2 * WIDE

    @property
    def _gathered(self) -> int:
        """Bytes of what is whole for a moment: all outside the layers, two of them, a layer's gradients."""
        sizes = self.sizes
        outside = max(sizes.head, sizes.parameters - sizes.layers * sizes.layer)
        gradients = 0 if self.config.lora else 2 * WIDE * sizes.layer
        return self._width * (outside + 2 * sizes.layer) + gradients

    def _activations(self, tokens: int) -> int:
        """Return what a micro-batch keeps for its backward pass, with the largest moment of that pass."""
        sizes, width, whole = self.sizes, self._width, self.config.lora is None
        layer = width * (sizes.kept if whole else sizes.kept_frozen) + WIDE * sizes.kept_wide
        if not whole and width == HALF:  # adapters are in float32, and so are copies of their inputs
            layer += WIDE * sum(inputs for inputs, _ in sizes.linears.values())
        passing = 2 * width * sizes.inner + WIDE * sizes.hidden_size
        head = self._head(int(tokens * SAMPLED))
        if self.config.gradient_checkpointing:
            return tokens * width * sizes.layers * sizes.hidden_size + max(tokens * (layer + passing), head)
        return tokens * sizes.layers * layer + max(tokens * passing, head)

    def _head(self, sampled: int) -> int:
        """Return the bytes of the LM head's backward pass over so many trained tokens."""
        sizes, narrow, row = self.sizes, self._width == HALF, WIDE * self.sizes.vocab_size
        # Logits and probabilities of a chunk, and if the model is narrow, their rounded gradient.
        chunk = min(CHUNK_ON_CUDA, sampled) * (2 * row + narrow * HALF * sizes.vocab_size)
        head = min(sampled * row, KEPT_BYTES) + chunk
        if self.config.lora is None:  # the gradient of the head is summed in float32, and then rounded
            head += (WIDE + narrow * HALF) * sizes.head
        return head
