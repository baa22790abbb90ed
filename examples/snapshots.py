"""Try several continuations from one state: take a snapshot during an episode, and restore it.

python examples/snapshots.py
"""

import agentenv as ae


class Maze(ae.ToolEnv):
    """Walk to the exit without passing it."""

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
    env = ae.make(Maze)
    maze = env.unwrapped
    env.reset(seed=0, options={"task": {"width": 4}})
    env.step(walk(1))
    half_way = maze.snapshot()

    for steps in (1, 2, 3, 4):
        maze.restore(half_way)  # a snapshot can be used any number of times
        _, reward, terminated, _, _ = env.step(walk(steps))
        print(f"from 1, {steps} steps: at {maze.place}, reward {reward}, terminated {terminated}")
    env.close()


if __name__ == "__main__":
    main()
