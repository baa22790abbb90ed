"""One turn: write a time of the twelve-hour clock on that of twenty-four hours."""

import random

import agentenv as ae


def on_24(hour: int, minute: int, half: str) -> str:
    return f"{hour % 12 + 12 * (half == 'pm'):02}:{minute:02}"


class Clock(ae.ToolEnv):
    """Write a time on a clock of 24 hours."""

    def start(self, hour: int, minute: int, half: str) -> str:
        self.want = on_24(hour, minute, half)
        return f"Write {hour}:{minute:02} {half} as HH:MM on a clock of 24 hours."

    def reward(self, answer: str) -> float:
        return float(answer.strip().rstrip(".") == self.want)

    @staticmethod
    def oracle(messages, task, rng):
        return on_24(**task)


hours = [(12, "am"), *((hour, "pm") for hour in range(1, 12))]  # which all change
rows = [{"hour": hour, "minute": minute, "half": half} for hour, half in hours for minute in range(60)]
random.Random(0).shuffle(rows)
ae.register("recipes/Clock-v0", Clock, tasks={"train": rows[:-100], "test": rows[-100:]}, max_turns=1)
