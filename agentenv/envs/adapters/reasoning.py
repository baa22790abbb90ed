"""Tasks of reasoning-gym: `reasoning_gym:countdown` and about a hundred others.

One question, one answer; the data set's own verifier scores it, from 0 to 1. Task `n` is row `n` of
the data set with seed 0; of 2,000 rows every fifth is held out. Answers may stand in
`<answer>` tags; without them the whole text counts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentenv.core.errors import DependencyMissing
from agentenv.core.messages import Message
from agentenv.envs.tool_env import ToolEnv

__all__ = ["ReasoningGym", "datasets", "rows"]

SIZE = 2_000

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym(ToolEnv):
    """One question of a reasoning-gym data set, scored by its own verifier."""

    system_prompt = "Think as long as you need, then give the final answer as <answer>...</answer>."

    def start(self, dataset: str, index: int) -> str:
        """Make the row and ask its question."""
        self._data = _dataset(dataset)
        self._entry: dict[str, Any] = self._data[index]
        return str(self._entry["question"])

    def reward(self, answer: str) -> float:
        """Ask the data set's verifier."""
        found = _ANSWER.findall(answer)
        return float(self._data.score_answer((found[-1] if found else answer).strip(), self._entry))

    @staticmethod
    def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> str:
        """Give the reference answer that comes with the row."""
        entry = _dataset(str(task["dataset"]))[int(str(task["index"]))]
        return f"<answer>{entry['answer']}</answer>"


def datasets() -> list[str]:
    """Return the names of reasoning-gym's data sets.

    Raises:
        DependencyMissing: reasoning-gym is not installed.
    """
    return sorted(_factory().DATASETS)


def rows(name: str, split: str) -> list[dict[str, object]]:
    """Return the tasks of a split, `train` or `test`."""
    return [
        {"id": f"{name}-{n}", "dataset": name, "index": n}
        for n in range(SIZE)
        if (n % 5 == 4) == (split == "test")
    ]


def _factory() -> Any:
    try:
        from reasoning_gym import factory  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DependencyMissing.of("reasoning-gym", "envs", purpose="reasoning_gym:NAME") from error
    return factory


@lru_cache(maxsize=256)
def _dataset(name: str) -> Any:
    return _factory().create_dataset(name, seed=0, size=SIZE)
