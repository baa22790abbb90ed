"""Tasks of reasoning-gym: `reasoning_gym:countdown` and about a hundred other data sets.

An episode is one question and one answer, which the data set's own verifier scores from 0 to 1. Task `n` is
row `n` of the data set with seed 0. There are 2,000 rows, and every fifth is held out. The answer may be in
`<answer>` tags; without them the whole text is the answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentenv.core import DependencyMissing, Message
from agentenv.envs import ToolEnv

__all__ = ["ReasoningGym", "datasets", "rows"]

SIZE = 2_000

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym(ToolEnv):
    """One question of a reasoning-gym data set, scored by the data set's own verifier."""

    system_prompt = "Think as long as you need, then give the final answer as <answer>...</answer>."

    def start(self, dataset: str, index: int) -> str:
        """Generate the row and return its question."""
        self._data = _dataset(dataset)
        self._entry: dict[str, Any] = self._data[index]
        return str(self._entry["question"])

    def reward(self, answer: str) -> float:
        """Return the score of the data set's verifier."""
        tagged = _ANSWER.findall(answer)
        return float(self._data.score_answer((tagged[-1] if tagged else answer).strip(), self._entry))

    @staticmethod
    def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> str:
        """Return the reference answer of the row."""
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
