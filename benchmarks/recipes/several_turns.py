"""Several turns with a state: turn a dial, step by step, to the wanted number, then say so."""

import random

import agentenv as ae


class Dial(ae.ToolEnv):
    """Turn a dial to a number."""

    def start(self, now: int, want: int) -> str:
        self.now, self.want = now, want
        return f"The dial is at {now}. Turn it to {want}, then say Done."

    @ae.tool
    def turn(self, direction: str) -> int:
        """Turn the dial by one, up or down, and return where it is."""
        if direction not in ("up", "down"):
            raise ae.ToolError("the direction is up or down")
        self.now += 1 if direction == "up" else -1
        return self.now

    def reward(self) -> float:
        return float(self.now == self.want)

    @staticmethod
    def oracle(messages, task, rng):
        now = int(messages[-1]["content"]) if messages[-1]["role"] == "tool" else task["now"]
        if now == task["want"]:
            return "Done."
        return ae.testing.tool_call_message("turn", direction="up" if now < task["want"] else "down")


rows = [{"now": now, "want": now + by} for now in range(10, 90) for by in (-3, -2, -1, 1, 2, 3)]
random.Random(0).shuffle(rows)
ae.register("recipes/Dial-v0", Dial, tasks={"train": rows[:-50], "test": rows[-50:]}, max_turns=6)
