"""Gymnasium's toy-text environments, played in words: FrozenLake, Taxi, CliffWalking and Blackjack.

The lake has a new map for each task and is not slippery. FrozenLake, Taxi and CliffWalking score 1 for
reaching the goal, whatever the number of steps; Blackjack keeps its own reward of -1, 0 or 1.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

import agentenv as ae
from agentenv.core import Message, text_of
from agentenv_envs.games import GymnasiumGame

__all__ = ["Blackjack", "CliffWalking", "FrozenLake", "Taxi"]

Cell = tuple[int, int]
_MOVES: Mapping[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


class FrozenLake(GymnasiumGame):
    """Walk over a frozen lake with a new map for each task."""

    def __init__(self) -> None:
        super().__init__("FrozenLake-v1", is_slippery=False)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Any]:
        """Make a lake with the task's map."""
        self.inner.close()
        lake = generate_random_map(size=4, p=0.75, seed=int(str(self.task.get("seed", seed))) % 2**31)
        self.inner = gymnasium.make("FrozenLake-v1", desc=lake, is_slippery=False, disable_env_checker=True)
        return super().reset(seed=seed, options=options)

    @staticmethod
    def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> str:
        """Walk a shortest way that has no holes."""
        rows = _grid(text_of(messages[-1]))
        start = _find(rows, "P")

        def free(cell: Cell, _: str) -> bool:
            return 0 <= cell[0] < len(rows) and 0 <= cell[1] < len(rows[0]) and rows[cell[0]][cell[1]] != "H"

        return _first_move(start, _find(rows, "G"), free, _MOVES)


class CliffWalking(GymnasiumGame):
    """Walk along a cliff without falling; falling ends the episode."""

    def __init__(self) -> None:
        super().__init__("CliffWalking-v1")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score 1 for reaching the goal, and end the episode at the first fall."""
        told, reward, terminated, truncated, info = super().step(action)
        if reward <= -100:
            return "You fell off the cliff.", 0.0, True, False, info
        return told, float(terminated), terminated, truncated, info

    @staticmethod
    def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> str:
        """Walk one row above the cliff."""
        rows = _grid(text_of(messages[-1]))
        row, column = _find(rows, "P")
        if column == len(rows[0]) - 1:
            return "down"
        return "up" if row == len(rows) - 1 else "right"


class Taxi(GymnasiumGame):
    """Bring a passenger to their destination."""

    def __init__(self) -> None:
        super().__init__("Taxi-v4")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score 1 when the passenger arrives."""
        told, _, terminated, truncated, info = super().step(action)
        return told, float(terminated), terminated, truncated, info

    @staticmethod
    def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> str:
        """Drive the shortest way to the passenger, and from there to the destination."""
        town = [line for line in text_of(messages[0]).splitlines() if line.startswith("|")]
        told = text_of(messages[-1])
        numbers = [int(digits) for digits in re.findall(r"\d+", told[told.rindex("Taxi:") :])]
        at, goal, riding = (numbers[0], numbers[1]), (numbers[-2], numbers[-1]), "in the taxi" in told
        target = goal if riding else (numbers[2], numbers[3])
        if at == target:
            return "dropoff" if riding else "pickup"
        names = {"up": "north", "down": "south", "left": "west", "right": "east"}

        def free(cell: Cell, move: str) -> bool:
            row, column = cell
            if not (0 <= row < 5 and 0 <= column < 5):
                return False
            # A wall is drawn between two columns; its position is counted from the cell that is entered.
            wall = town[row][2 * column + 2] if move == "west" else town[row][2 * column]
            return move in {"north", "south"} or wall != "|"

        return _first_move(at, target, free, {names[name]: step for name, step in _MOVES.items()})


class Blackjack(GymnasiumGame):
    """Play one hand of blackjack."""

    def __init__(self) -> None:
        super().__init__("Blackjack-v1")


def _grid(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.splitlines()]
    return [tiles for tiles in lines if len(tiles) > 2 and all(len(tile) == 1 for tile in tiles)]


def _find(rows: Sequence[Sequence[str]], tile: str) -> Cell:
    return next((r, c) for r, tiles in enumerate(rows) for c, other in enumerate(tiles) if other == tile)


def _first_move(start: Cell, goal: Cell, free: Callable[[Cell, str], bool], moves: Mapping[str, Cell]) -> str:
    """Return the first move of a shortest way, found by breadth-first search."""
    queue: list[tuple[Cell, str]] = [(start, "")]
    seen = {start}
    for cell, first in queue:
        if cell == goal:
            return first
        for name, (down, right) in moves.items():
            neighbour = (cell[0] + down, cell[1] + right)
            if neighbour not in seen and free(neighbour, name):
                seen.add(neighbour)
                queue.append((neighbour, first or name))
    raise ValueError(f"there is no way from {start} to {goal}")


def _seeds(start: int, count: int) -> list[dict[str, object]]:
    return [{"id": f"seed-{seed}", "seed": seed} for seed in range(start, start + count)]


def _train() -> list[dict[str, object]]:
    return _seeds(0, 800)


def _test() -> list[dict[str, object]]:
    return _seeds(100_000, 200)


for _name, _kind, _turns in (
    ("FrozenLake", FrozenLake, 20),
    ("CliffWalking", CliffWalking, 24),
    ("Taxi", Taxi, 30),
    ("Blackjack", Blackjack, 12),
):
    ae.register(f"agentenv/{_name}-v0", _kind, tasks={"train": _train, "test": _test}, max_turns=_turns)
