"""TRL's GRPOTrainer trains a model on an environment of ours; our runner plays, so the tokens are exact.

python examples/trl_trains_ours.py MODEL [STEPS]        (pip install trl)
"""

import sys

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import agentenv as ae
from agentenv_bridges import environment_reward, rollout_func, task_rows


class Adder(ae.ToolEnv):
    """Add two numbers with a tool."""

    def start(self, x: int, y: int) -> str:
        self.want = x + y
        return f"What is {x} + {y}?"

    @ae.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def reward(self, answer: str) -> float:
        return float(str(self.want) in answer) + 0.1 * bool(answer.strip())


def finished(truncated, **_):  # functions for TRL get what the runner recorded
    return [0.1 * (not cut) for cut in truncated]


def main(model: str, steps: int = 20) -> None:
    tasks = [{"x": x, "y": x * x} for x in range(80)]
    spec = ae.EnvSpec.of("examples/Adder-v0", Adder, tasks=tasks)
    gpu = torch.cuda.is_available()
    config = GRPOConfig(
        "runs/trl",
        max_steps=steps,
        max_completion_length=200,
        per_device_train_batch_size=4,
        num_generations=4,
        logging_steps=1,
        use_cpu=not gpu,
        bf16=gpu,
        save_strategy="no",
    )
    play = rollout_func(spec, limits=ae.RunLimits(max_turns=3, max_tokens_per_turn=40))
    rows = Dataset.from_list(task_rows(spec))
    trainer = GRPOTrainer(model, [environment_reward, finished], config, rows, rollout_func=play)
    trainer.train()
    for line in trainer.state.log_history[:-1]:
        print(f"step {line['step']}: reward {line['reward']:.2f}, loss {line['loss']:.3f}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
