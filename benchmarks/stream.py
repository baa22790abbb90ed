"""Compare a stream of groups with batches that are played one after another.

The environment pays for each lower-case letter of an answer. Its episodes sleep for times with a long tail,
as tools and simulators do, so that playing waits and does not compute. The model is a tiny one with random
weights, trained on the CPU. Each way trains the same number of steps from the same weights, over several
seeds, and each run is timed from its first step to its last.

    python benchmarks/stream.py [--seeds 0,1,2] [--steps 100] [--quick] [--json stream.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import agentenv as ae
from agentenv.envs import EnvSpec
from agentenv.render import byte_tokenizer
from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer

WAYS: dict[str, dict[str, object]] = {
    "synchronous": {},
    "stream, max_ahead=1": {"max_ahead": 1},
    "stream, max_ahead=4": {"max_ahead": 4},
}
GROUPS, MEMBERS, TOKENS = 4, 8, 12
GOOD = 0.7
"""Mean reward of ten steps; the time is printed after which a run first has it."""
MEDIAN_S, SIGMA = 0.4, 1.0


class Letters(ae.ToolEnv):
    """Pays for each lower-case letter of the answer, after a wait that is long for some tasks."""

    scale = 1.0

    async def start(self, n: int) -> str:
        """Draw the wait from the task."""
        self.wait_s = self.scale * MEDIAN_S * Random(n).lognormvariate(0.0, SIGMA)
        return "abc"

    async def reward(self, answer: str) -> float:
        """Wait, and return the share of lower-case letters."""
        await asyncio.sleep(self.wait_s)
        return sum(letter.islower() for letter in answer[:TOKENS]) / TOKENS


def model_of(seed: int) -> LlamaForCausalLM:
    """Return a model of random weights."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=byte_tokenizer().vocab_size, initializer_range=0.1, **sizes)
    return LlamaForCausalLM(config).eval()


def train(seed: int, steps: int, rate: float, options: Mapping[str, object]) -> dict[str, float]:
    """Train once, and return the seconds between the first and the last step, and the last rewards."""
    marks = [0.0]
    trainer = GRPOTrainer(
        GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            seed=seed,
            max_steps=steps,
            groups_per_step=GROUPS,
            num_generations=MEMBERS,
            learning_rate=rate,
            **options,  # pyright: ignore[reportArgumentType]
        ),
        model=model_of(seed),
        tokenizer=byte_tokenizer(),
        envs=EnvSpec.of("bench/Letters-v0", Letters, tasks=[{"n": n} for n in range(10_000)]),
        limits=ae.RunLimits(max_turns=1, max_tokens_per_turn=TOKENS),
        runner=ae.RunnerOptions(concurrency=512),
        callbacks=Callbacks(on_metrics=lambda *_: marks.append(time.perf_counter())),
    )
    history = trainer.train()
    means = [
        sum(one["reward"] for one in history[end - 10 : end]) / 10 for end in range(10, len(history) + 1)
    ] or [0.0]
    good = next((index + 10 for index, mean in enumerate(means) if mean >= GOOD), 0)
    return {
        "seconds": marks[-1] - marks[1],
        "reward": means[-1],
        "seconds_to_good": marks[good] - marks[1] if good else float("nan"),
        "first": history[0]["reward"],
        "staleness": max(one["staleness/max"] for one in history),
        "waited_groups": sum(one["time/wait/groups"] for one in history[1:]),
        "waited_staleness": sum(one["time/wait/staleness"] for one in history[1:]),
        "update": sum(one["time/update"] + one["time/logprob"] for one in history[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=0.003, help="learning rate")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all waits")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, short waits")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    seeds = [0] if given.quick else [int(seed) for seed in given.seeds.split(",")]
    steps = 6 if given.quick else given.steps
    Letters.scale = 0.1 if given.quick else given.scale
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for seed in seeds:
        for name, options in WAYS.items():
            one = train(seed, steps, given.rate, options)
            results[name].append(one)
            print(
                f"{name:26s} {seed} {one['seconds']:6.1f} s  {one['first']:.2f} -> {one['reward']:.2f},"
                f" {GOOD} after {one['seconds_to_good']:.1f} s"
                f"  staleness {one['staleness']:.0f}  waited {one['waited_groups']:.1f} s for groups,"
                f" {one['waited_staleness']:.1f} s for the bound  trained {one['update']:.1f} s",
                flush=True,
            )
    for name, runs in results.items():
        ratios = [
            base["seconds"] / one["seconds"] for base, one in zip(results["synchronous"], runs, strict=True)
        ]
        print(f"{name:26s} {min(ratios):.2f} to {max(ratios):.2f} x the speed of synchronous batches")
    if given.json:
        given.json.write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
