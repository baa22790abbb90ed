"""Compute what trainings of five model sizes need on GPUs of 80 GB; docs/training/gpus.md has some rows.

    python benchmarks/capacity.py [--quick] [--offload] [--json PATH]

Nothing is measured: no GPU is used and no weights are read, only the configs in benchmarks/model_configs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from agentenv.placement import CapacityPlan, Machine, plan_capacity, read_config
from agentenv.training import GRPOConfig

CONFIGS = Path(__file__).parent / "model_configs"
MODELS = ("1B", "8B", "14B", "32B", "30B-A3B")
CONTEXTS = {"8k": 8192, "32k": 32768}
GPUS = (1, 4, 8)
HEAD = "| model | GPUs | training, GB | sampling, GB | division | contexts |"


def rows(
    model: str, contexts: dict[str, int], gpus: tuple[int, ...], *, offload: bool
) -> list[tuple[str, CapacityPlan]]:
    """Return the plans of one model, with gradient checkpointing, by name of the context."""
    shape = read_config(str(CONFIGS / model))
    config = GRPOConfig(gradient_checkpointing=True, optimizer_offload=offload)
    return [
        (
            name,
            plan_capacity(shape, config, model=model, context=context, machine=Machine(count, 80)),
        )
        for name, context in contexts.items()
        for count in gpus
    ]


def line(plan: CapacityPlan) -> str:
    """Return a plan as a row of a table."""
    placement = plan.placement
    needed = f"{placement.trainer.total / 1e9:.0f}"
    if not placement.fits:
        near = "; ".join(f"`{change}`" for change in plan.alternatives) or "nothing near"
        return f"| {plan.model} | {plan.machine.gpus} | {needed} | | does not fit; the nearest: {near} | |"
    sampled = "" if placement.server is None else f"{placement.server.total / 1e9:.0f}"
    split = f"{placement.trainers} + {placement.servers} of {placement.tensor_parallel}"
    split = split if placement.servers else "the same GPU"
    cells = (plan.model, plan.machine.gpus, needed, sampled, split, f"{placement.contexts:.0f}")
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the smallest model at 8k")
    parser.add_argument("--models", nargs="+", default=MODELS, help="folders of benchmarks/model_configs")
    parser.add_argument("--offload", action="store_true", help="with the optimiser in main memory")
    parser.add_argument("--json", type=Path, help="write the plans to this file")
    given = parser.parse_args()
    models = MODELS[:1] if given.quick else given.models
    contexts = {"8k": CONTEXTS["8k"]} if given.quick else CONTEXTS
    found = [row for model in models for row in rows(model, contexts, GPUS, offload=given.offload)]
    for name in contexts:
        print(f"\nContexts of {name}\n\n{HEAD}\n|{' --- |' * 6}")
        for context, plan in found:
            if context == name:
                print(line(plan))
    if given.json:
        plans = [
            {"context": name, "placement": asdict(one.placement)} | {"model": one.model}
            for name, one in found
        ]
        given.json.write_text(json.dumps(plans, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
