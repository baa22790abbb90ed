"""Games in which the policy plays several seats: what the environment and the runner agree on.

The environment of a game plays the seat of its own episode. For each further seat that the policy plays, it
asks the runner for an episode beside its own, with the function in `seat_opener`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol, TypeAlias

from agentenv.core.episode_env import EpisodeEnv

__all__ = ["OpenSeat", "SeatEpisode", "at_seat", "game_of", "seat_opener"]

_SEAT = "/seat:"


class SeatEpisode(Protocol):
    """The episode of a further seat, as the environment of the game sees it."""

    async def wait(self, move: asyncio.Future[str | None]) -> None:
        """Wait until the seat has moved or its episode has ended.

        The time limit of the environment does not run meanwhile, because the seat has limits of its own.

        Raises:
            Exception: The seat's episode failed; the exception fails the game's episode with the same error.
        """
        ...


OpenSeat: TypeAlias = Callable[[str, EpisodeEnv], SeatEpisode]
"""Begins the episode of a seat on an environment of its own."""

seat_opener: ContextVar[OpenSeat | None] = ContextVar("agentenv_seat_opener", default=None)
"""Opens further seats of the episode that the current task plays; None where the runner plays no episode."""


def at_seat(name: str, seat: str) -> str:
    """Return the task id or group id of a further seat of a game."""
    return f"{name}{_SEAT}{seat}"


def game_of(group_id: str) -> str:
    """Return the group id of a game's own episode, given the group id of any of its seats."""
    return group_id.partition(_SEAT)[0]
