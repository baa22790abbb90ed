"""`MultiEnv`, the base class of games for several players.

1. Authors write the game: `start`, `turn` (whose turn it is), `observe` (what a seat is told), `act` and
   `rewards` (of every seat), as in PettingZoo's AEC interface.
2. The policy plays one seat of each episode, and the opponents play the others. A trajectory therefore holds
   one seat's view, tokens and reward. The seat is a field of the task, so a group has one task and one seat,
   and each seat has a baseline of its own.
3. An opponent may be chance, a function, or another model, for example an earlier checkpoint. What it writes
   is never trained on: the policy's seat sees it only as far as `observe` tells it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentenv.core.errors import EnvironmentMisuse, TaskError
from agentenv.core.seeds import derive_seed
from agentenv.envs import spaces
from agentenv.envs.env import Env
from agentenv.envs.opponents import Move, Opponent, OpponentLike, players_of

__all__ = ["MultiEnv", "for_each_seat"]

MAX_MOVES = 10_000
"""Moves of opponents in a row, after which the game is taken to be stuck."""


class MultiEnv(Env):
    """A game for several seats, of which the policy plays one.

    Args:
        opponents: who plays the other seats: `random`, a model string, a `TextModel`, a function of the
            `Move`, or a mapping from seat to one of these.
    """

    observation_space = spaces.Text()
    action_space = spaces.Text()

    seats: Sequence[str] = ("first", "second")
    """Names of the seats, in the order in which they move first."""
    ends_on_text = False

    def __init__(self, opponents: OpponentLike | Mapping[str, OpponentLike] = "random") -> None:
        self.opponents = opponents
        self.seat = self.seats[0]
        self._players: dict[str, Opponent] = {}
        self._rngs: dict[str, random.Random] = {}

    # What authors write -------------------------------------------------------------------

    def start(self, task: Mapping[str, object], seed: int) -> None:
        """Begin a game of this task; the same seed begins the same game."""
        raise NotImplementedError(f"{type(self).__name__} must write start()")

    def turn(self) -> str | None:
        """Return the seat whose turn it is; None if the game is over."""
        raise NotImplementedError(f"{type(self).__name__} must write turn()")

    def observe(self, seat: str) -> str:
        """Return what a seat is told before its move and at the end: what is new since its last turn."""
        raise NotImplementedError(f"{type(self).__name__} must write observe()")

    def act(self, seat: str, text: str) -> None:
        """Play a move. A text that is no valid move is the game's to judge, usually by ending the game."""
        raise NotImplementedError(f"{type(self).__name__} must write act()")

    def rewards(self) -> Mapping[str, float]:
        """Return the reward of each seat; called once the game is over."""
        raise NotImplementedError(f"{type(self).__name__} must write rewards()")

    def choices(self, seat: str) -> Sequence[str]:
        """Return the valid moves of a seat, which an opponent played by chance needs."""
        return ()

    # The game as the environment of one seat ------------------------------------------------

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin a game, and let the opponents move until it is the policy's turn."""
        game_seed = int(str(self.task.get("seed", seed)))
        named = self.task.get("seat")
        self.seat = self.seats[game_seed % len(self.seats)] if named is None else str(named)
        if self.seat not in self.seats:
            raise TaskError(f"there is no seat {self.seat!r}", remedy=f"there are: {', '.join(self.seats)}")
        # The members of a group share the seed of the episode, so chance plays the same against each of them.
        own = derive_seed(self.context.seed, "opponents")
        self._players = players_of(self.opponents, self.seats, self.seat, self.system_prompt, own)
        self._rngs = {other: random.Random(derive_seed(own, other, "moves")) for other in self.seats}
        self.start(self.task, game_seed)
        await self._let_others_move()
        if self.turn() is None:
            raise EnvironmentMisuse(f"{self.env_id}: the game is over before seat {self.seat} had a turn")
        return self.observe(self.seat), {"seat": self.seat}

    async def step(self, action: str) -> Any:
        """Play the policy's move, and let the opponents move until it is its turn again."""
        self.act(self.seat, action)
        await self._let_others_move()
        told = self.observe(self.seat)
        if self.turn() is not None:
            return told, 0.0, False, False, {"seat": self.seat}
        rewards = dict(self.rewards())
        return told, float(rewards[self.seat]), True, False, {"seat": self.seat, "seat_rewards": rewards}

    async def _let_others_move(self) -> None:
        for _ in range(MAX_MOVES):
            seat = self.turn()
            if seat is None or seat == self.seat:
                return
            move = Move(seat, self.observe(seat), self.choices(seat), self._rngs[seat])
            self.act(seat, await self._players[seat].move(move))
        raise EnvironmentMisuse(
            f"{self.env_id}: after {MAX_MOVES} moves of opponents it is still not seat {self.seat}'s turn"
        )


def for_each_seat(tasks: Iterable[Mapping[str, object]], seats: Sequence[str]) -> list[dict[str, object]]:
    """Return each task once for each seat, for a set that trains or evaluates all seats."""
    rows: list[dict[str, object]] = []
    for task in tasks:
        for seat in seats:
            named = {"id": f"{task['id']}-{seat}"} if "id" in task else {}
            rows.append({**task, **named, "seat": seat})
    return rows
