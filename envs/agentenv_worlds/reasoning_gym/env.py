"""Tasks of reasoning-gym: `reasoning_gym:countdown` and about a hundred other data sets.

An episode is one question and one answer, which the data set's own verifier scores from 0 to 1. Task `n` is
row `n` of the data set with seed 0. There are 2,000 rows, and every fifth is held out. The answer may be in
`<answer>` tags; without them the whole text is the answer.

Some verifiers raise an exception on an answer of another form than they expect. Such an answer is wrong and
counts 0; the part `verifier_raised` of the reward, whose weight is 0, says so.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentenv.core import DependencyMissing, Message, UsageError
from agentenv.envs import ToolEnv

__all__ = ["ReasoningGym", "datasets", "kind_of", "rows", "verifier_raised"]

SIZE = 2_000
_log = logging.getLogger(__name__)

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym(ToolEnv):
    """One question of a reasoning-gym data set, scored by the data set's own verifier."""

    system_prompt = "Think as long as you need, then give the final answer as <answer>...</answer>."

    def start(self, dataset: str, index: int) -> str:
        """Generate the row and return its question."""
        self._data = _dataset(dataset)
        self._entry: dict[str, Any] = self._data[index]
        self.verifier_raised = False
        return str(self._entry["question"])

    def reward(self, answer: str) -> float:
        """Return the score of the data set's verifier."""
        tagged = _ANSWER.findall(answer)
        final = (tagged[-1] if tagged else answer).strip()
        try:
            return float(self._data.score_answer(final, self._entry))
        except Exception as error:  # noqa: BLE001 - verifiers raise whatever their parsers do
            self.verifier_raised = True
            _log.debug("the verifier of %s raised on %r: %s", self.task["dataset"], final[:80], error)
            return 0.0

    @staticmethod
    def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> str:
        """Return the reference answer of the row."""
        entry = _dataset(str(task["dataset"]))[int(str(task["index"]))]
        return f"<answer>{entry['answer']}</answer>"


class WithoutReference(ReasoningGym):
    """A question of a data set that gives no answer which its own verifier accepts."""

    oracle = None  # pyright: ignore[reportAssignmentType]


def verifier_raised(env: ReasoningGym) -> float:
    """Return 1 if the verifier raised an exception on the answer, which therefore counted 0."""
    return float(env.verifier_raised)


def kind_of(name: str) -> type[ReasoningGym]:
    """Return the environment of a data set, which has an oracle if the set has reference answers.

    Raises:
        UsageError: The data set cannot be made.
    """
    try:
        data = _dataset(name)
        entry = data[0]
    except Exception as error:
        raise UsageError(
            f"reasoning_gym:{name} cannot be made: {type(error).__name__}: {str(error)[:200]}",
            remedy="choose another one: it needs settings, or this version of the package breaks it",
        ) from error
    try:
        solved = float(data.score_answer(str(entry["answer"]), entry)) >= 1
    except Exception:  # noqa: BLE001 - as in `reward`
        solved = False
    return ReasoningGym if solved else WithoutReference


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
