"""Facts about the processor that decide which of two equal ways to compute is the faster one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["computes_bfloat16", "prefers_onednn"]

CPU_INFO = Path("/proc/cpuinfo")


@cache
def prefers_onednn() -> bool:
    """Return whether oneDNN multiplies float32 matrices much faster than MKL, torch's library for them.

    MKL leaves the upper half of AVX-512 registers unused on AMD's processors, and oneDNN does not. On an EPYC
    of 2024 oneDNN took 0.45 to 0.55 of the time for 64 rows and more. The answer depends on nothing that
    changes, so that two runs of one program compute the same numbers.
    """
    facts = _facts()
    return facts.get("vendor_id") == "AuthenticAMD" and "avx512f" in facts.get("flags", "").split()


@cache
def computes_bfloat16() -> bool:
    """Return whether the processor has instructions for products in bfloat16."""
    return not {"avx512_bf16", "amx_tile"}.isdisjoint(_facts().get("flags", "").split())


def _facts() -> dict[str, str]:
    """Return what Linux says of the first core; nothing elsewhere."""
    try:
        first = CPU_INFO.read_text().partition("\n\n")[0]
    except OSError:
        return {}
    return dict(_fact(line) for line in first.splitlines() if ":" in line)


def _fact(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()
