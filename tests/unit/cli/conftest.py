"""Each test of the command line stands in a directory of its own, with a file that has an environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.envs import registry

ADDER = '''
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
        return float(str(self.want) in answer)


def half(answer):
    return 0.5


ae.register("cli/Adder-v0", Adder, tasks=[{"x": i, "y": 1} for i in range(50)])
'''


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Go to an empty directory, and forget the environments that the test registered."""
    monkeypatch.chdir(tmp_path)
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)


@pytest.fixture
def adder(tmp_path: Path) -> str:
    (tmp_path / "adder.py").write_text(ADDER)
    return "adder.py"
