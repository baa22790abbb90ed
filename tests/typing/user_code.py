"""A user's program that checkers of types read and nobody runs.

`check.py` fails unless pyright and mypy report each line that ends in `# wrong`, and no other line.
"""

from typing import Any, assert_type

import agentenv as ae
from agentenv.runs import EvalResult
from agentenv.training import GRPOConfig, TrainResult


class Adder(ae.ToolEnv):
    """An environment with tools."""

    tasks = ({"x": 1, "y": 2},)

    def __init__(self, digits: int = 2) -> None:
        self.digits = digits
        self.want = 0

    def start(self, x: int, y: int) -> str:
        self.want = x + y
        return f"What is {x} + {y}?"

    @ae.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def reward(self, answer: str) -> float:
        return float(str(self.want) in answer)


class Asked(Adder):
    """An environment with a `step` around that of its tools."""

    async def step(  # type: ignore[override] # mypy compares it with Gymnasium's, which is synchronous
        self, action: ae.Message
    ) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = await super().step(action)
        return observation, reward + 1, terminated, truncated, info


class Guess(ae.Env):
    """An environment with synchronous methods."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(10))
        return "Guess.", {"task": self.task}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "no", 0.0, action == str(self.number), False, {}


class LateGuess(ae.Env):
    """An environment with asynchronous methods."""

    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return "Guess.", {}

    async def step(  # type: ignore[override]
        self, action: ae.Message
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "no", 0.0, False, False, {}


class Returns(ae.Env):
    """An environment whose `step` forgets a value."""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:  # wrong
        return "no", 0.0, False, {}


def environments() -> None:
    adder = Adder(digits=3)
    assert_type(adder, Adder)
    assert_type(adder.want, int)
    assert_type(adder.snapshot(), ae.envs.Snapshot)
    assert_type(adder.context.seed, int)
    Adder("two")  # wrong
    Adder(digit=2)  # wrong
    adder.no_such_method()  # wrong
    adder.start("1", 2)  # wrong

    guess = ae.make(Guess)
    assert_type(guess.unwrapped, Guess)
    assert_type(guess.unwrapped.number, int)
    observation, info = guess.reset(seed=1, options={"task": {"x": 1}})
    assert_type(info, dict[str, Any])
    observation, reward, terminated, truncated, info = guess.step("5")
    print(observation, reward + 1, terminated and truncated)
    guess.close()
    guess.reset(sead=1)  # wrong
    guess.step(5)  # wrong
    guess.unwrapped.numbre  # wrong
    _one, _two, _three = guess.reset()  # wrong

    assert_type(ae.make("agentenv/Calculator-v0").unwrapped, ae.Env)
    entry = ae.register("demo/Adder-v0", Adder, tasks=[{"x": 1, "y": 2}], max_turns=4)
    assert_type(entry, ae.EnvSpec)
    ae.register("demo/Adder-v0", Adder, max_turn=4)  # wrong
    ae.make(3)  # wrong


@ae.tool(timeout_s=5)
def shout(text: str) -> str:
    """Write a text in capitals."""
    return text.upper()


def tools() -> None:
    assert_type(shout.name, str)
    assert_type(Adder().toolbox.names, tuple[str, ...])
    ae.Toolbox([shout, "calculator"])
    shout.nam  # wrong
    ae.tool(timeout=5)  # wrong


def evaluating() -> None:
    result = ae.evaluate("demo/Adder-v0", "mock", num_tasks=3, workers=2, limits={"max_turns": 2})
    assert_type(result, EvalResult)
    assert_type(result.report.num_scored, int)
    ae.evaluate("demo/Adder-v0", num_taks=3)  # wrong
    ae.evaluate("demo/Adder-v0", workers="two")  # wrong
    ae.evaluate("demo/Adder-v0", splitt="test")  # wrong
    ae.evaluate(num_tasks=3)  # wrong
    result.repport  # wrong

    groups = ae.rollout("demo/Adder-v0", group_size=4, seed=3, sampling=ae.Sampling(temperature=0.5))
    assert_type(groups, list[ae.TrajectoryGroup])
    assert_type(groups[0].trajectories[0].reward, float | None)
    ae.rollout("demo/Adder-v0", group_sizes=4)  # wrong
    ae.rollout("demo/Adder-v0", seed="x")  # wrong
    ae.Sampling(temprature=0.5)  # wrong
    ae.RunLimits(max_turn=3)  # wrong


def training() -> None:
    result = ae.train("demo/Adder-v0", "PATH", steps=20, group_size=8, learning_rate=1e-5, beta=0.0)
    assert_type(result, TrainResult)
    ae.train("demo/Adder-v0", "PATH", train=GRPOConfig(learning_rate=1e-5))
    ae.train("demo/Adder-v0", "PATH", lora={"r": 16}, on_metrics=lambda step, metrics: print(step + 1))
    ae.train("demo/Adder-v0", "PATH", learning_rat=1e-5)  # wrong
    ae.train("demo/Adder-v0", "PATH", learning_rate="1e-5")  # wrong
    GRPOConfig(learning_rat=1e-5)  # wrong


def folders() -> None:
    print(ae.endpoint.__all__, ae.workers.__all__, ae.training.__all__, ae.placement.__all__)
    print(ae.trainig)  # wrong
