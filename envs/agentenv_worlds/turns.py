"""Which turn of an episode it is, and tasks of games for several players: each game once for each seat."""

from __future__ import annotations

from collections.abc import Sequence

from agentenv.core import Message
from agentenv.envs import held_out_seeds, train_seeds

__all__ = ["held_out_seats", "train_seats", "turn_of"]


def turn_of(messages: Sequence[Message]) -> int:
    """Return how many messages the model has said."""
    return sum(message["role"] == "assistant" for message in messages)


def train_seats(seats: tuple[str, ...], seed: int) -> dict[str, object]:
    """Return the training task of a seed in a game for several players."""
    return {**train_seeds(seed // len(seats)), "seat": seats[seed % len(seats)]}


def held_out_seats(seats: tuple[str, ...], seed: int) -> dict[str, object]:
    """Return the held-out task of a seed in a game for several players."""
    return {**held_out_seeds(seed // len(seats)), "seat": seats[seed % len(seats)]}
