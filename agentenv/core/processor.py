"""Whether the processor computes in bfloat16, which decides the format of a model on the CPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["computes_bfloat16"]

CPU_INFO = Path("/proc/cpuinfo")


@cache
def computes_bfloat16() -> bool:
    """Return whether the processor has instructions for products in bfloat16.

    Linux says so of the first core, and elsewhere the answer is False.
    """
    try:
        first = CPU_INFO.read_text().partition("\n\n")[0]
    except OSError:
        return False
    flags = (line.partition(":")[2] for line in first.splitlines() if line.startswith("flags"))
    return not {"avx512_bf16", "amx_tile"}.isdisjoint(" ".join(flags).split())
