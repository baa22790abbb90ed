"""How much a pass of the trainer takes at once, from which the memory of a training follows.

`agentenv plan` counts with these numbers and rules, too, and so nothing here loads torch.
"""

from __future__ import annotations

__all__ = [
    "CHUNK",
    "CHUNK_ON_CUDA",
    "FIRST_TOKENS",
    "KEPT_BYTES",
    "first_tokens",
    "reduces_each_pass",
]

CHUNK = 256
"""Number of trained tokens that pass the LM head at once. It bounds the memory of the logits."""
CHUNK_ON_CUDA = 1024
"""The same on CUDA, where products of few rows leave most of the device idle."""
KEPT_BYTES = 96 << 20
"""Memory for probabilities that are kept for the backward pass, which saves recomputing them."""
FIRST_TOKENS = 4096
"""Tokens of a micro-batch where nothing was given or measured."""
FIRST_BYTES, MOST_FIRST = 20 * 10**9, 4
"""Memory of a device for each `FIRST_TOKENS` of its first micro-batch, and their largest multiple."""


def first_tokens(device_bytes: int | None) -> int:
    """Return the tokens of the first micro-batch on a device; None is one of which nothing is known."""
    times = 1 if device_bytes is None else device_bytes // FIRST_BYTES
    return FIRST_TOKENS * max(1, min(MOST_FIRST, times))


def reduces_each_pass(trained: int, device_bytes: int) -> bool:
    """Return whether the gradients of so many parameters would take more than a quarter of a device."""
    return 4 * trained > device_bytes / 4
