r"""Questions of mathematics from a file: `math:gsm8k_test.jsonl`.

Each line of the file is a JSON object. The question is its field `question` or `problem`. The reference is
`solution`, `answer` or `final_answer`, as in GSM8K (the number behind `####`), MATH (`\boxed{}`) and files
with the bare answer. `MathReward` compares it with the model's answer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentenv.core import Message, TaskError, json_lines
from agentenv.envs import ToolEnv
from agentenv_worlds.math.reward import MathReward

__all__ = ["MathQuestions", "rows"]

_QUESTIONS = ("question", "problem")
_REFERENCES = ("solution", "answer", "final_answer")


class MathQuestions(ToolEnv):
    """One question of mathematics, and one answer."""

    system_prompt = "Think step by step, then give the final answer in \\boxed{}."

    def __init__(self) -> None:
        self._reward = MathReward("solution")

    def start(self, question: str, solution: str) -> str:
        """Return the question."""
        return question

    async def reward(self, answer: str, task: Mapping[str, object]) -> float | None:
        """Return 1 if the answer is right, else 0; None if the reference cannot be read."""
        return await self._reward(answer, task)

    @staticmethod
    def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> str:
        """Return the reference."""
        reference = str(task["solution"])
        number = reference.rpartition("####")[2].strip()
        return reference if "\\boxed" in reference else f"\\boxed{{{number}}}"


def rows(path: str) -> list[dict[str, object]]:
    """Return the tasks of a file.

    Raises:
        TaskError: The file cannot be read, or a line has no question or no reference.
    """
    try:
        return [_task(path, number, row) for number, row in json_lines(Path(path), error=TaskError)]
    except OSError as error:
        raise TaskError(f"math:{path} cannot be read: {error}", remedy="name a file of JSON lines") from error


def _task(path: str, number: int, row: Any) -> dict[str, object]:
    try:
        question, solution = (
            next(str(row[name]) for name in names if row.get(name) is not None)
            for names in (_QUESTIONS, _REFERENCES)
        )
    except (AttributeError, TypeError, StopIteration, RuntimeError) as error:
        raise TaskError(
            f"line {number} of {path} is no question with a reference: {row!r:.80}",
            remedy=f"give it one of the fields {', '.join(_QUESTIONS)} and one of {', '.join(_REFERENCES)}",
        ) from error
    task: dict[str, object] = {"question": question, "solution": solution}
    return {"id": str(row["id"]), **task} if "id" in row else task
