"""A guest changes an order, and the model looks up what the guest pays: the task of `examples/demo.py`.

Both dishes stand in the question and both have a price, so an answer for the wrong one looks right. Only the
reward tells them apart.

    agentenv eval examples/counter.py -m oracle
    agentenv train examples/counter.py -m smollm2 --demos examples/counter.py:clerk --steps 8
"""

import random
from itertools import permutations

import agentenv as ae

GUESTS = ("Ana", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas")
DISHES = {
    "train": ("soup", "salad", "pasta", "curry", "rice", "pie", "toast", "fish", "stew", "beans", "pizza"),
    "test": ("noodles", "lasagna", "risotto", "pancakes", "waffles", "sushi", "porridge", "dumplings"),
}


class Counter(ae.ToolEnv):
    """Say what a guest pays who orders one dish and then changes to another one."""

    system_prompt = "Look up the price, then answer with it."

    def start(self, guest: str, first: str, second: str, prices: dict[str, int]) -> str:
        self.prices, self.want = prices, prices[second]
        return f"{guest} ordered {first} and then changed to {second}. What does {guest} pay?"

    @ae.tool
    def price(self, dish: str) -> int:
        """Return the price of a dish."""
        if dish not in self.prices:
            raise ae.ToolError("this dish is not on the menu")
        return self.prices[dish]

    def reward(self, answer: str) -> float:
        return float(answer.strip().rstrip(".").endswith(f" {self.want}"))

    @staticmethod
    def oracle(messages, task, rng):
        """Look up the dish that the guest changed to."""
        return _reply(messages, task, "second")


def clerk(messages, task, rng):
    """Look up either dish: a clerk who half listens, and is right in four episodes of ten."""
    return _reply(messages, task, "second" if rng.random() < 0.4 else "first")


def tasks(split: str) -> list[dict]:
    """Return all pairs of dishes of a split in a fixed random order. No dish is in both splits."""
    rng = random.Random(split)
    rows = [
        {
            "guest": rng.choice(GUESTS),
            "first": first,
            "second": second,
            "prices": dict(zip((first, second), rng.sample(range(3, 30), 2), strict=True)),
        }
        for first, second in permutations(DISHES[split], 2)
    ]
    rng.shuffle(rows)
    return rows


def _reply(messages, task, dish):
    if messages[-1]["role"] == "tool":
        return f"The price is {messages[-1]['content']}."
    return ae.testing.tool_call_message("price", dish=task[dish])


SPEC = ae.register(
    "demo/Counter-v0", Counter, tasks={"train": tasks("train"), "test": tasks("test")}, max_turns=3
)
