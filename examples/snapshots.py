"""Try several continuations from the same state: snapshot an environment in mid-episode, come back to it.

python examples/snapshots.py
"""

import agentenv as ae


class Maze(ae.ToolEnv):
    """Walk to the exit; each step into a wall costs the way back."""

    tasks = ({"width": 4},)

    def start(self, width: int) -> str:
        self.width = width
        self.place = 0
        return f"You stand at 0; the exit is at {width}."

    @ae.tool
    def walk(self, steps: int) -> str:
        """Walk forward."""
        self.place += steps
        return f"You stand at {self.place}."

    def is_done(self) -> bool:
        return self.place >= self.width

    def reward(self) -> float:
        return float(self.place == self.width)


def walk(steps: int) -> ae.Message:
    function = {"name": "walk", "arguments": f'{{"steps": {steps}}}'}
    call = {"id": f"walk-{steps}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def main() -> None:
    env = Maze()
    env.reset(seed=0, options={"task": {"width": 4}})
    env.step(walk(1))
    half_way = env.snapshot()

    for steps in (1, 2, 3, 4):
        env.restore(half_way)  # a snapshot can be used any number of times
        _, reward, terminated, _, _ = env.step(walk(steps))
        print(f"from 1, {steps} steps: at {env.place}, reward {reward}, terminated {terminated}")
    env.close()


if __name__ == "__main__":
    main()
