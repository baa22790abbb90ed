"""How many tokens a micro-batch may have: a given number, or one that follows from the device's memory.

Without a given number it is 4,096 tokens for each 20 GB of a GPU, at most 16,384, because passes of few
tokens take the time of their launches. It is 4,096 for shards, which repeat no pass where memory runs out.

Where memory runs out all the same, half as many tokens are tried, whether the number was given or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from agentenv.core.errors import TrainingFailed
from agentenv.core.visible import logger
from agentenv.training.learners.pass_sizes import first_tokens

__all__ = ["TokenBudget", "memory_of"]

log = logger(__name__)


def memory_of(device: torch.device) -> int | None:
    """Return the bytes of a device that this process has or could have; None on the CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


class TokenBudget:
    """The largest number of tokens of a micro-batch; a longer row has one of its own.

    Args:
        given: the number that the user chose; None if it follows from the memory.
        memory: the memory of the device in bytes; None where nothing is known of it.
        gather: returns the values of all processes.
    """

    def __init__(
        self, given: int | None, memory: int | None, gather: Callable[[Sequence[int]], Sequence[int]]
    ) -> None:
        self.tokens = given or first_tokens(memory)
        self._gather = gather

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
        log.warning(
            "memory ran out in a micro-batch of %d tokens; the update is computed again with at most %d: %s",
            max(failed),
            self.tokens,
            failure or "of another process",
        )
        return True
