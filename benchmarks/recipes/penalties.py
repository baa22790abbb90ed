"""Penalties: find a number in the right box; each other box and a wrong number cost something."""

import random

import agentenv as ae

BOXES = ["red", "blue", "green", "black", "white", "yellow"]


class Boxes(ae.ToolEnv):
    """Tell the number in a box, and open no other one."""

    def start(self, box: str, other: str, number: int) -> str:
        self.box, self.number, self.needless = box, number, 0
        return f"Which number is in the {box} box, left of the {other} one? Open no other box."

    @ae.tool
    def open_box(self, colour: str) -> int:
        """Return the number in a box."""
        self.needless += colour != self.box
        return self.number if colour == self.box else 100

    def reward(self, answer: str) -> float:
        right = answer.strip().rstrip(".").endswith(f" {self.number}")
        return (1.0 if right else -0.5) - 0.25 * self.needless

    @staticmethod
    def oracle(messages, task, rng):
        if messages[-1]["role"] == "tool":
            return f"It is {messages[-1]['content']}."
        return ae.testing.tool_call_message("open_box", colour=task["box"])


draw = random.Random(0)
pairs = [(box, other) for box in BOXES for other in BOXES if box != other]
rows = [
    {"box": box, "other": other, "number": number}
    for box, other in pairs
    for number in draw.sample(range(101, 1000), 20)
]
draw.shuffle(rows)
ae.register("recipes/Boxes-v0", Boxes, tasks={"train": rows[:-50], "test": rows[-50:]}, max_turns=3)
