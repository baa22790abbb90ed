"""Compare the optimiser's step on the CPU with torch's AdamW, on float32 weights of the shapes of SmolLM2.

    OMP_NUM_THREADS=1 python benchmarks/optimizer.py
    OMP_NUM_THREADS=1 python benchmarks/optimizer.py --quick --json optimizer.json

Each kind of step runs in a process of its own, clipping included, and the processes take turns. "fused" and
"foreach" are torch's own kernels; without a word torch takes "foreach" on the CPU where it can.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trainer import CELLS, build_model

HOWS = ("ours", "fused", "foreach")


def step_of(how: str) -> Callable[[], float]:
    """Return a function that makes a step and returns its CPU seconds; copying the gradients is left out."""
    import torch

    from agentenv.training import GRPOConfig
    from agentenv.training.learners.torch import MasterOptimizer

    model = build_model(CELLS["f32"], "float32", "cpu")
    weights = list(model.parameters())
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(one.shape, generator=generator) for one in weights]
    config = GRPOConfig()
    optimizer = MasterOptimizer(model.named_parameters(), config) if how == "ours" else None
    peer = torch.optim.AdamW(weights, lr=1e-6, **{how: True}) if optimizer is None else None

    def step() -> float:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        began = time.process_time()
        if optimizer is not None:
            optimizer.step(1e-6)
        else:
            torch.nn.utils.clip_grad_norm_(weights, config.optimizer.max_grad_norm)
            peer.step()
        return time.process_time() - began

    return step


def main() -> None:
    """Measure and print the table, and write JSON if `--json` is set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three steps instead of ten")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--child", choices=HOWS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        step = step_of(options.child)
        for _ in sys.stdin:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(json.dumps({"cpu_s": step(), "peak_rss_mb": peak}), flush=True)
        return
    children = {
        how: subprocess.Popen(
            [sys.executable, __file__, "--child", how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for how in HOWS
    }
    taken: dict[str, list[dict[str, float]]] = {how: [] for how in HOWS}
    for _ in range(1 + (3 if options.quick else 10)):  # the first one makes the state
        for how, child in children.items():
            child.stdin.write("\n")
            child.stdin.flush()
            taken[how].append(json.loads(child.stdout.readline()))
    rows = []
    for how, child in children.items():
        child.communicate()
        least = min(one["cpu_s"] for one in taken[how][1:])
        rows.append({"how": how, "cpu_s": least, "peak_rss_mb": taken[how][-1]["peak_rss_mb"]})
        print(f"{how:<8} {least:.3f} CPU-s, {rows[-1]['peak_rss_mb']:.0f} MB")
    print(f"ours / fused: {rows[0]['cpu_s'] / rows[1]['cpu_s']:.2f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
