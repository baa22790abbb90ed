"""Games of textarena for two players and more, for example `textarena:TicTacToe-v0`.

The policy plays one seat, and the opponents play the others; see `agentenv.envs.multi_env`. The text of a
player is its move, and the game's messages to a player are its observations. The game judges moves that are
not valid. The rewards are the game's, usually from -1 to 1.
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from agentenv.envs import MultiEnv, OpponentLike
from agentenv_worlds.textarena.env import global_generator, readable, reward_of, started

__all__ = ["TextArenaSeats", "seat_names"]

_MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
"""A move in the texts of textarena, which show valid moves in brackets."""


def seat_names(players: int) -> tuple[str, ...]:
    """Return the names of the seats of a game."""
    return tuple(f"player-{number}" for number in range(players))


class TextArenaSeats(MultiEnv):
    """A game of textarena for several players, of which the policy is one.

    Args:
        game: id of the game.
        players: number of players.
        opponents: who plays the other seats. `random` plays one of the moves that the game showed in
            brackets, which is not always a valid one.
    """

    def __init__(
        self, game: str, players: int, opponents: OpponentLike | Mapping[str, OpponentLike] = "random"
    ) -> None:
        self.seats = seat_names(players)
        super().__init__(opponents)
        self.game = game
        self._inner: Any = None
        self._random: object = None

    def start(self, task: Mapping[str, object], seed: int) -> None:
        """Start the game of this seed."""
        game_seed = seed % 2**31
        self._random = random.Random(game_seed).getstate()
        self._over = False
        self._shown = dict.fromkeys(self.seats, "")
        with self._generator():
            self._inner = started(self.game, game_seed, len(self.seats))

    def turn(self) -> str | None:
        """Return the seat of the game's current player."""
        return None if self._over else self.seats[int(self._inner.state.current_player_id)]

    def observe(self, seat: str) -> str:
        """Return the game's messages to a seat since its last turn, without its own."""
        number = self.seats.index(seat)
        said: Sequence[tuple[int, str, Any]] = self._inner.state.observations[number]
        if self.turn() == seat:
            with self._generator():
                _, said = self._inner.get_observation()
        told = "\n".join(
            str(text) if sender < 0 else f"Player {sender}: {text}"
            for sender, text, _ in said
            if sender != number
        )
        self._shown[seat] = told or self._shown[seat]
        return told

    def act(self, seat: str, text: str) -> None:
        """Play the move."""
        with self._generator():
            self._over, _ = self._inner.step(action=readable(text))

    def rewards(self) -> Mapping[str, float]:
        """Return the game's rewards."""
        rewards, _ = self._inner.close()
        return {seat: reward_of(rewards, number) for number, seat in enumerate(self.seats)}

    def choices(self, seat: str) -> Sequence[str]:
        """Return the moves that the game showed this seat last: a guess, because textarena has no list.

        Where it showed none, for example when players talk, any text is a move.
        """
        shown = self._shown[seat]
        named = shown.rpartition("vailable")[2] or shown
        return list(dict.fromkeys(_MOVE.findall(named))) or ["Hello."]

    @contextmanager
    def _generator(self) -> Generator[None]:
        with global_generator(self._random) as state:
            yield
        self._random = state()
