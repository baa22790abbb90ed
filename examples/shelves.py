import random

import agentenv as ae

FIRST = "Amber Broken Crystal Distant Empty Frozen Golden Hidden Iron Lost Painted Quiet Silent Stolen Velvet Wooden".split()
SECOND = "Anchor Bridge Castle Desert Feather Forest Garden Harbour Island Lantern Mirror Orchard River Tower Valley Window".split()


class Shelves(ae.ToolEnv):
    """Tell a reader on which shelf a book stands."""

    def start(self, title: str, shelf: int) -> str:  # the task's fields, by name
        self.title, self.shelf = title, shelf
        return f"On which shelf is {title}?"

    @ae.tool
    def find(self, title: str) -> int:
        """Return the shelf of a book.

        Args:
            title: The whole title.
        """
        if title != self.title:
            raise ae.ToolError("there is no book of this title")
        return self.shelf

    def reward(self, answer: str) -> float:  # once, when the episode ends
        return float(answer.strip().rstrip(".").endswith(f" {self.shelf}"))

    @staticmethod
    def oracle(messages, task, rng):
        """Solve a task: call the tool first, then answer with what it returned."""
        if messages[-1]["role"] == "tool":
            return f"It is on shelf {messages[-1]['content']}."
        return ae.testing.tool_call_message("find", title=task["title"])


def clerk(messages, task, rng):
    """Play a careless clerk, who leaves out the first word of six titles of ten and then finds nothing."""
    if messages[-1]["role"] == "tool":
        found = messages[-1]["content"]
        return f"It is on shelf {found}." if found.isdigit() else "I cannot find this book."
    title = task["title"] if rng.random() < 0.4 else task["title"].removeprefix("The ")
    return ae.testing.tool_call_message("find", title=title)


def tasks(half: int) -> list[dict]:
    rng = random.Random(half)
    titles = [f"The {first} {second}" for first in FIRST for second in SECOND][half::2]
    rows = [{"title": title, "shelf": rng.randrange(100, 1000)} for title in titles]
    rng.shuffle(rows)
    return rows


ae.register("demo/Shelves-v0", Shelves, tasks={"train": tasks(0), "test": tasks(1)}, max_turns=3)
