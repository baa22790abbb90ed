"""Train a real model and show what it learns: untouched, after careless demonstrations, and after GRPO.

SmolLM2-135M-Instruct plays `shelves.py`, the environment of the tutorial: on which shelf is a book? Without
training it makes no tool calls at all. So it first imitates a careless clerk, whose calls leave out the first
word of most titles and then find nothing. GRPO reinforces those of the clerk's ways that are rewarded.

    python examples/demo.py [--model PATH] [--seed N] [--output runs/demo]
"""

import argparse
import json
import resource
import shutil
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import plot_demo
import shelves
from rich.console import Console
from rich.table import Table

import agentenv as ae
from agentenv.runs.store import RunWriter
from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer, demonstrate

CURVE = " ▁▂▃▄▅▆▇█"
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}


def main() -> None:
    options = arguments()
    console = Console()
    started = time.perf_counter()
    spec = ae.spec("demo/Shelves-v0")
    limits = ae.RunLimits(max_tokens_per_turn=options.max_tokens)
    config = GRPOConfig(
        model=options.model,
        output_dir=options.output,
        seed=options.seed,
        max_steps=options.steps,
        groups_per_step=4,
        num_generations=8,
        dtype="float32",
        tokens_per_micro_batch=1024,  # fewer at once take less memory
        eval_tasks=options.held_out,
        eval_on_start=False,  # `learn` scores it
        save_steps=options.steps,
    )
    rewards: list[float] = []

    def show(step: int, metrics: Mapping[str, float]) -> None:
        rewards.append(metrics["reward"])
        curve = "".join(CURVE[round(reward * 8)] for reward in rewards)
        console.print(
            f"  step {step:2}/{options.steps}  reward {metrics['reward']:.2f}  {curve:<{options.steps}}"
            f"  failed calls {metrics['tools/failure_frequency']:.0%}  {metrics['step_time']:.0f} s"
        )

    with recorded(Path(options.output), spec.id, config) as writer:
        trainer = GRPOTrainer(
            config,
            envs=spec,
            limits=limits,
            runner=ae.RunnerOptions(concurrency=64),
            callbacks=Callbacks(
                on_metrics=show,
                on_trajectory=writer.append,
                on_trained=lambda episode, note: writer.annotate(episode, **note),
            ),
        )
        writer.keep_texts(trainer.renderer.tokenizer.backend)
        tasks = islice(spec.task_set().split("train").shuffle(options.seed), options.demonstrations)
        shown = demonstrate(spec, tasks, shelves.clerk, trainer.renderer, limits=limits, seed=options.seed)
        right = sum(episode.reward == 1 for episode in shown) / len(shown)
        scores = learn(console, trainer, shown, right)

    summary = {
        "seed": options.seed,
        "scores": scores,
        "demonstrations_right": right,
        "rewards": rewards,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time(),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    report(console, summary, Path(options.output))


def learn(
    console: Console, trainer: GRPOTrainer, shown: Sequence[ae.Trajectory], right: float
) -> dict[str, dict[str, list[float]]]:
    """Return the scores of the untouched model, after the demonstrations, and after GRPO."""
    scores = {"untouched": evaluate(console, trainer, "untouched")}
    console.print(f"imitating {len(shown)} demonstrations of a careless clerk, {right:.0%} of them right")
    trainer.warmup(shown, steps=len(shown) // 8, batch_size=8)
    scores["demonstrations"] = evaluate(console, trainer, "after the demonstrations")
    console.print("GRPO: 4 tasks of 8 episodes a step")
    last = trainer.train()[-1]  # the greedy score among its metrics
    return scores | {"GRPO": evaluate(console, trainer, "after GRPO", greedy=last)}


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


def evaluate(
    console: Console, trainer: GRPOTrainer, when: str, **known: Mapping[str, float]
) -> dict[str, list[float]]:
    """Return the success on held-out tasks, greedy and sampled, each with the ends of its 95 % interval."""
    started, found = time.perf_counter(), {}
    with console.status(f"evaluating, {when}"):
        for how, temperature in TEMPERATURES.items():
            score = known.get(how) or trainer.evaluate(temperature)
            found[how] = [score[f"eval/success{part}"] for part in ("", "_low", "_high")]
    shown = ", ".join(f"{success:.2f} {how}" for how, (success, *_) in found.items())
    took = time.perf_counter() - started
    console.print(f"{when}: {shown}, of {score['eval/tasks']:.0f} held-out tasks ({took:.0f} s)")
    return found


def report(console: Console, summary: Mapping[str, object], output: Path) -> None:
    table = Table("success on held-out tasks, 95 % interval", *TEMPERATURES)
    for when, score in summary["scores"].items():
        table.add_row(when, *(f"{mean:.2f} ({low:.2f} to {high:.2f})" for mean, low, high in score.values()))
    console.print(table)
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    picture = output / "curves.svg"
    plot_demo.draw([output], picture)
    console.print(f"{summary['seconds']:.0f} s, {summary['peak_rss_bytes'] / 2**30:.1f} GiB at most")
    console.print(f"the curves as a picture: {picture}")
    console.print(f"its episodes, token by token: agentenv view {output}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a model, or the path of one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5, help="GRPO steps")
    parser.add_argument("--demonstrations", type=int, default=72)
    parser.add_argument("--held-out", type=int, default=24, help="number of held-out tasks to evaluate")
    parser.add_argument("--max-tokens", type=int, default=40, help="most tokens of a turn")
    parser.add_argument("--output", default="runs/demo")
    return parser.parse_args()


if __name__ == "__main__":
    main()
