"""Our trainer takes an environment class and a reward function that were written for TRL, unchanged.

python examples/train_trl_class.py MODEL [STEPS] [TOKENS]
"""

import sys

import agentenv as ae
from agentenv.envs.adapters import tool_env


class Guess:
    """As TRL's `environment_factory` takes it: `reset` gets the task's columns, public methods are tools."""

    def reset(self, secret: int, **others) -> str:
        self.secret, self.tries = secret, 0
        return "Guess a number from 1 to 9 with the tool."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: A number from 1 to 9.
        """
        self.tries += 1
        if number == self.secret:
            return "right"
        return "too low" if number < self.secret else "too high"


def reward(environments, completions, **columns) -> list[float]:
    """Return the rewards of a batch, in the way of TRL; here a longer last answer is a little better."""
    last = [messages[-1].get("content") or "" for messages in completions]
    return [1.0 * (env.tries > 0) + len(text) / 1000 for env, text in zip(environments, last, strict=True)]


tasks = [{"secret": secret} for secret in range(1, 10)]
ae.register("examples/Guess-v0", tool_env(Guess, reward), tasks=tasks, max_turns=4)


def main(model: str, steps: int = 20, tokens: int = 40) -> None:
    result = ae.train(
        "examples/Guess-v0",
        model,
        steps=steps,
        group_size=4,
        groups_per_step=2,
        demos="none",
        limits={"max_tokens_per_turn": tokens},
    )
    for step, metrics in enumerate(result.history, 1):
        print(f"step {step}: reward {metrics['reward']:.2f}")
    print(f"agentenv view {result.run.id}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
