"""The same answers scored by a world's own authors and by ours.

Each module compares some worlds. `compare(world, answers, seed)` plays random answers (right ones, right ones
that were changed, wrong, empty and malformed ones) here and through the authors' own code.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

__all__ = ["WORLDS", "Agreement", "compare"]


@dataclass(slots=True)
class Agreement:
    """How many answers scored the same."""

    world: str
    compared: int = 0
    differ: list[str] = field(default_factory=list)
    """What differs, an answer a line."""
    rewarded: int = 0
    """Answers that the authors reward; if none were, or all were, little was compared."""

    def add(self, official: float, ours: float | None, told: object) -> None:
        """Take note of an answer's two scores."""
        self.compared += 1
        self.rewarded += official > 0
        if ours is None or abs(official - ours) > 1e-6:
            self.differ.append(f"{told}: {official} there, {ours} here"[:500])


WORLDS = {
    "bfcl single-turn": ("bfcl", 4_280),
    "bfcl multi-turn": ("bfcl", 500),
    "agentdojo": ("agentdojo", 520),
    "tau2 retail": ("tau2", 40),
    "tau2 airline": ("tau2", 40),
    "tau2 telecom": ("tau2", 500),
    "tau2 banking_knowledge": ("tau2", 500),
    "reasoning_gym": ("answers", 1_050),
    "math": ("answers", 500),
    "arc": ("answers", 500),
    "textarena": ("games", 500),
    "pettingzoo": ("games", 500),
    "minigrid": ("games", 500),
    "crafter": ("games", 30),
    "nethack": ("games", 30),
    "textworld": ("texts", 30),
    "scienceworld": ("texts", 32),
    "textworld_express": ("texts", 200),
}
"""The module that compares a world, and how many answers are compared in the whole test."""


async def compare(world: str, answers: int | None = None, seed: int = 0) -> Agreement:
    """Compare a world's scores on random answers."""
    module, whole = WORLDS[world]
    return await importlib.import_module(f"agreement.{module}").compare(world, answers or whole, seed)
