"""An environment: tasks in two splits, a tool, a reward, an oracle; checked, played and scored.

python examples/environment.py
agentenv check examples/environment.py
agentenv eval examples/environment.py -m mock       # or -m smollm2, -m openai:NAME
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import agentenv as ae
from agentenv.core import text_of
from agentenv.testing import tool_call_message


class Till(ae.ToolEnv):
    """Work out what a customer pays."""

    system_prompt = "Add the prices with the tool, then say the sum."

    def start(self, prices: list[int]) -> str:  # the task's fields, by name; returns the first observation
        return f"I take these: {', '.join(map(str, prices))}. What do I pay?"

    @ae.tool
    def add(self, numbers: list[int]) -> int:
        """Add numbers."""
        return sum(numbers)

    def reward(self, answer: str, prices: list[int]) -> float:  # once, when the episode ends
        return float(answer.strip().rstrip(".").endswith(f" {sum(prices)}"))

    @staticmethod
    def oracle(messages: Sequence[ae.Message], task: Mapping[str, Any], rng: Random) -> ae.Message | str:
        """Solve a task; it proves that this can be done, and is what small models imitate first."""
        if messages[-1]["role"] == "tool":
            return f"You pay {text_of(messages[-1])}."
        return tool_call_message("add", numbers=task["prices"])


def tasks(seed: int) -> list[dict[str, Any]]:
    rng = Random(seed)
    return [{"prices": [rng.randrange(100, 1000) for _ in range(3)]} for _ in range(50)]


ae.register("demo/Till-v0", Till, tasks={"train": tasks(0), "test": tasks(1)}, max_turns=3)

if __name__ == "__main__":
    for policy in ("oracle", "random", "scripted:You pay 42."):
        result = ae.evaluate("demo/Till-v0", policy, num_tasks=10)  # of the held-out split
        print(f"{policy}: mean reward {result.report.reward.mean:.2f}")
    ((episode,),) = ae.rollout("demo/Till-v0", "oracle", num_tasks=1)
    for message in episode.messages:
        print(f"{message['role']:>9}: {text_of(message) or message.get('tool_calls')}")
