"""Measure what it costs the transformers engine to draw one token for each row of a pass.

    python benchmarks/sampler.py
    python benchmarks/sampler.py --quick --json sampler.json

The logits are those of a model that is unsure between few tokens, as in most turns, between hundreds, and
between most of its vocabulary. Plain sampling in the same run is the measure, because the forward pass before
it is the same for all. Sorting the whole vocabulary of each row stands beside.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agentenv.engine import Sampling
from agentenv.engine.hf.sampler import draw

VOCABULARY = 49_152
CUTS = {
    "greedy": {"temperature": 0.0},
    "top_p=0.95": {"top_p": 0.95},
    "top_p=0.95, support kept": {"top_p": 0.95, "keep_support": True},
    "top_k=50": {"top_k": 50},
    "top_k=50, top_p=0.95": {"top_k": 50, "top_p": 0.95},
    "min_p=0.05": {"min_p": 0.05},
}


def logits_of(rows: int, spread: float) -> torch.Tensor:
    """Return logits `[rows, VOCABULARY]`; the likeliest tokens stand out by up to `spread`."""
    generator = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, VOCABULARY, generator=generator) * 2
    values[:, 100:300] += torch.rand(rows, 200, generator=generator) * spread
    return values


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the least processor time of a call in milliseconds."""
    best = float("inf")
    for _ in range(repeats):
        began = time.thread_time()
        call()
        best = min(best, time.thread_time() - began)
    return best * 1000


def sort_whole(logits: torch.Tensor, top_p: float) -> None:
    """Cut each row by sorting its whole vocabulary."""
    for row in logits:
        ordered, order = row.softmax(-1).sort(descending=True, stable=True)
        row[order[ordered.cumsum(-1) - ordered >= top_p]] = float("-inf")


def measure(rows: int, kind: str, spread: float, repeats: int) -> list[dict[str, Any]]:
    """Return what each way of sampling costs for a pass of `rows` rows."""
    logits = logits_of(rows, spread)
    uniforms = [row / rows for row in range(rows)]
    copying = milliseconds(logits.clone, repeats)

    def cost(sampling: Sampling) -> float:
        return milliseconds(lambda: draw(logits.clone(), [sampling] * rows, uniforms), repeats) - copying

    plain = cost(Sampling())
    found = {"plain": plain} | {name: cost(Sampling(**cut)) for name, cut in CUTS.items()}
    found["top_p=0.95 by sorting everything"] = plain + (
        milliseconds(lambda: sort_whole(logits.clone(), 0.95), max(2, repeats // 4)) - copying
    )
    return [
        {
            "rows": rows,
            "logits": kind,
            "sampling": name,
            "ms": round(ms, 2),
            "times_plain": round(ms / plain, 2),
        }
        for name, ms in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    for rows in (8,) if options.quick else (8, 32):
        for kind, spread in (
            ("few likely tokens", 25.0),
            ("hundreds of them", 16.0),
            ("most of the vocabulary", 6.0),
        ):
            table += measure(rows, kind, spread, 5 if options.quick else 15)
    for row in table:
        print(
            f"{row['rows']:>3} rows, {row['logits']}: {row['sampling']:<34}"
            f"{row['ms']:>8} ms {row['times_plain']:>6} x"
        )
    if options.json:
        options.json.write_text(json.dumps({"sampler": table}, indent=2))


if __name__ == "__main__":
    main()
