"""Try an installed agentenv as a user's first minutes would, in an empty folder and from its wheel alone.

    VENV/bin/python smoke.py

A step of training is tried where torch is installed, and says so where it is not.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import EntryPoint, distribution, files
from pathlib import Path

ENV = "agentenv/Calculator-v0"
FILE = '''
import agentenv as ae


class Adder(ae.ToolEnv):
    """Ask for a sum."""

    def start(self, x: int, y: int) -> str:
        self.want = x + y
        return f"What is {x} + {y}?"

    @ae.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def reward(self, answer: str) -> float:
        return len(set(answer)) / 100


ae.register("smoke/Adder-v0", Adder, tasks=[{"x": number, "y": 1} for number in range(4)])
'''


def main() -> None:
    inspect_files()
    count = load_entry_points()
    Path("adder.py").write_text(FILE)
    listed = agentenv("list", "--load")
    assert ENV in listed, listed
    agentenv("check", ENV)
    for name in (ENV, "adder.py"):
        agentenv("eval", name, "--model", "mock", "--tasks", "2")
    agentenv("doctor")
    print(f"smoke: {count} entry points load; list, check, eval and doctor work")
    if importlib.util.find_spec("torch"):
        train()
        print("smoke: a step of training moves the weights")
    else:
        print("smoke: no step of training, because torch is not installed")


def inspect_files() -> None:
    """Check that the package comes from the wheel, with type markers and nothing else of the repository."""
    import agentenv

    place = Path(agentenv.__file__)
    assert "site-packages" in place.parts, f"imported from {place}, not from the wheel"
    assert agentenv.__version__ == distribution("agentenv-rl").version
    tops = {file.parts[0] for file in files("agentenv-rl") or () if file.suffix == ".py"}
    assert {top.split("_")[0] for top in tops} == {"agentenv"}, tops
    for top in tops:
        assert (place.parents[1] / top / "py.typed").exists(), f"{top} has no py.typed"


def load_entry_points() -> int:
    """Load what the package says that it has, except what asks for an extra or for another package."""
    points = [point for point in distribution("agentenv-rl").entry_points if loadable(point)]
    for point in points:
        assert point.load() is not None
    return len(points)


def loadable(point: EntryPoint) -> bool:
    return not point.extras and point.group not in {"vllm.general_plugins", "pytest11"}


def train() -> None:
    """Take one step; different answers have different rewards, so there is a gradient."""
    limits = ["groups_per_step=1", "max_tokens_per_turn=8", "max_turns=2", "eval_tasks=0"]
    settings = [word for limit in limits for word in ("-o", limit)]
    line = "train adder.py --model smollm2 --demos none --steps 1 -k 4 --json"
    said = agentenv(*line.split(), *settings)
    assert json.loads(said)["grad_norm"] > 0, said


def agentenv(*arguments: str) -> str:
    line = [sys.executable, "-m", "agentenv", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"agentenv {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
