"""Few demonstrations, and clumsy ones: twelve tasks, in most of which the demonstrator first asks wrongly."""

import random

import agentenv as ae

FIRST = "amber broken crystal distant empty frozen golden hidden iron lost".split()
SECOND = "anchor bridge castle desert feather forest garden harbour island lantern".split()


class Prices(ae.ToolEnv):
    """Tell the price of a thing."""

    def start(self, name: str, price: int) -> str:
        self.name, self.price = name, price
        return f"What does the {name} cost?"

    @ae.tool
    def look_up(self, name: str) -> int:
        """Return the price of a thing."""
        if name != self.name:
            raise ae.ToolError("there is no thing of this name")
        return self.price

    def reward(self, answer: str) -> float:
        return float(answer.strip().rstrip(".").endswith(f" {self.price}"))

    @staticmethod
    def oracle(messages, task, rng):
        if messages[-1]["role"] == "tool" and messages[-1]["content"].isdigit():
            return f"It costs {messages[-1]['content']}."
        clumsy = messages[-1]["role"] != "tool" and rng.random() < 0.6
        name = task["name"].split()[0] if clumsy else task["name"]
        return ae.testing.tool_call_message("look_up", name=name)


draw = random.Random(0)
rows = [
    {"name": f"{first} {second}", "price": draw.randrange(100, 1000)} for first in FIRST for second in SECOND
]
draw.shuffle(rows)
ae.register("recipes/Prices-v0", Prices, tasks={"train": rows[:12], "test": rows[-50:]}, max_turns=4)
