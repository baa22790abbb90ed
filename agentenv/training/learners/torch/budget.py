"""How many tokens a micro-batch may have: a given number, or one estimated from the memory of earlier passes.

Rules, for a GPU and without a given number:

1. The budget starts at 4,096 tokens for each 20 GB of the device, at most 16,384, because passes of few
   tokens take the time of their launches. It starts at 4,096 for shards, which repeat no pass where memory
   runs out.
2. After each update it follows from the measured peak. What the passes held beyond what stays (weights,
   gradients, states of the optimiser, reference) is taken to grow with the tokens of the largest one.
3. It at most doubles in one update, and leaves a tenth of the memory free.
4. All processes use the smallest of their budgets.

Where memory runs out all the same, half as many tokens are tried, whether the number was given or not.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from agentenv.core.errors import TrainingFailed
from agentenv.core.visible import logger
from agentenv.training.learners.pass_sizes import first_tokens

__all__ = ["CudaMemory", "Memory", "TokenBudget", "memory_of"]

log = logger(__name__)

USED = 0.9
"""Share of the memory that the passes may fill."""
STEP = 256
"""Budgets are multiples of this, so that small differences of measurements change nothing."""


class Memory(Protocol):
    """The memory of the device that trains, in bytes."""

    @property
    def total(self) -> int:
        """What this process holds or could still hold."""
        ...

    @property
    def held(self) -> int:
        """What tensors hold now."""
        ...

    @property
    def peak(self) -> int:
        """The most that tensors held at once since `reset`."""
        ...

    def reset(self) -> None:
        """Measure the peak from here on."""
        ...


class CudaMemory:
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total(self) -> int:
        """What this process has reserved, and what is free beside other users of the device."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)

    @property
    def held(self) -> int:
        """What tensors hold now."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak(self) -> int:
        """The most that tensors held at once since `reset`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset(self) -> None:
        """Measure the peak from here on."""
        torch.cuda.reset_peak_memory_stats(self._device)


def memory_of(device: torch.device) -> Memory | None:
    """Return the memory of a device; None if it cannot be measured, as on the CPU."""
    return CudaMemory(device) if device.type == "cuda" else None


class TokenBudget:
    """The largest number of tokens of a micro-batch; a longer row has one of its own.

    Args:
        given: the number that the user chose; None if it follows from the memory.
        memory: the memory of the device; None keeps the first number.
        gather: returns the values of all processes.
        repeats: whether a pass is made again, half as large, where memory runs out.
    """

    def __init__(
        self,
        given: int | None,
        memory: Memory | None,
        gather: Callable[[Sequence[int]], Sequence[int]],
        *,
        repeats: bool = True,
    ) -> None:
        self.tokens = given or first_tokens(memory.total if memory is not None and repeats else None)
        self.memory = memory if given is None else None
        """The memory that the number follows; None if it stays as it is."""
        self._most: int | None = None
        """What the number may grow to again after memory ran out."""
        self._gather = gather

    @contextmanager
    def measured(self, sizes: Sequence[int]) -> Generator[None]:
        """Measure the passes of an update, and set the budget of the next one.

        All processes call this together.

        Args:
            sizes: number of tokens of each micro-batch of this process.
        """
        memory = self.memory
        assert memory is not None  # otherwise there is nothing to measure
        before = memory.held
        memory.reset()
        yield
        # Gradients are part of what stays. In a single pass they grow while activations are freed, so that
        # what was held before it is the safe bound.
        stays = before if len(sizes) == 1 else memory.held
        self.tokens = min(self._gather([self._next(max(sizes, default=0), stays, memory)]))

    def _next(self, largest: int, stays: int, memory: Memory) -> int:
        """Return the budget that this process could use next."""
        if 2 * largest < self.tokens:
            return self.tokens  # fixed costs of a small pass would be taken for those of its tokens
        each = max(1.0, (memory.peak - stays) / largest)
        fitting = int((USED * memory.total - memory.held) / each)
        most = 2 * self.tokens if self._most is None else min(2 * self.tokens, self._most)
        return max(STEP, min(fitting, most) // STEP * STEP)

    def shrink(self, failure: str, largest: int) -> bool:
        """Halve the budget if the memory of a process ran out; return whether it did.

        All processes call this together.

        Args:
            failure: what the device of this process said; empty if its memory was enough.
            largest: tokens of the largest micro-batch of this process that has several rows; 0 if none has.

        Raises:
            TrainingFailed: A micro-batch of one row does not fit.
        """
        failed = [size for size in self._gather([largest if failure else -1]) if size >= 0]
        if not failed:
            return False
        if not min(failed):
            raise TrainingFailed(
                f"a single row does not fit into the memory of a device ({failure or 'of another process'})",
                remedy="set gradient_checkpointing, lora, fsdp on more devices, or a lower max_total_tokens; "
                "`agentenv plan` counts what each of them needs",
            )
        self.tokens = max(failed) // 2
        self._most = 3 * self.tokens // 2  # three quarters of what did not fit
        log.warning(
            "memory ran out in a micro-batch of %d tokens; the update is computed again with at most %d: %s",
            max(failed),
            self.tokens,
            failure or "of another process",
        )
        return True
