"""`MultiEnv`, the base class of games for several players.

1. Authors write the game: `start`, `turn` (whose turn it is), `observe` (what a seat is told), `act` and
   `rewards` (of every seat), as in PettingZoo's AEC interface.
2. An episode is one seat of a game: its view, its tokens and its reward. The seat is a field of the task, so
   a group has one task and one seat, and each seat has a baseline of its own.
3. An opponent may be chance, a function, or another model, for example an earlier checkpoint. What it writes
   is never trained on: the policy's seat sees it only as far as `observe` tells it.
4. The opponent `self` is the policy. Its seat then has an episode of its own in the same game, in the group
   of that task and that seat, and both are trained.
5. A seat whose episode is cut, for example by a token limit, loses by `abandon`, so that no seat can
   escape a loss by not finishing the game.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentenv.core.episode_env import Context, ResetResult, derive_seed
from agentenv.core.errors import EnvironmentMisuse, TaskError, UsageError
from agentenv.core.seats import seat_opener
from agentenv.envs import spaces
from agentenv.envs.env import Env, ResetReturn, StepReturn
from agentenv.envs.opponents import Move, Opponent, OpponentLike, players_of
from agentenv.envs.seat_env import PolicySeat, SeatEnv

__all__ = ["MultiEnv", "for_each_seat"]

MAX_MOVES = 10_000
"""Moves of opponents in a row, after which the game is taken to be stuck."""


class MultiEnv(Env):
    """A game for several seats; an episode is one of them.

    Args:
        opponents: who plays the other seats: `self` (the policy), `random`, a model string,
            `league:DIRECTORY` (checkpoints), a `TextModel`, a function of the `Move`, a list
            of these of which each game draws one, or a mapping from seat to one of these.
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
        self._together: dict[str, SeatEnv] = {}
        """The further seats that the policy plays in this game."""
        self._left = ""
        """The seat that left the game; empty if none did."""
        self._result: dict[str, float] | None = None
        """The rewards of all seats, once they are known."""
        self._paid = False
        """Whether a step has given this seat its reward."""

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

    def abandon(self, seat: str) -> Mapping[str, float]:
        """Return the rewards of a game that a seat did not play to its end; by default it loses.

        What it loses, the others share, so that the rewards still sum to zero.
        """
        share = 1.0 / max(1, len(self.seats) - 1)
        return {other: -1.0 if other == seat else share for other in self.seats}

    def choices(self, seat: str) -> Sequence[str]:
        """Return the valid moves of a seat, which an opponent played by chance needs."""
        return ()

    # The game as the environment of one seat ------------------------------------------------

    async def begin(self, task: Mapping[str, object], *, seed: int, context: Context) -> ResetResult:
        """Start an episode on a task; it may be over before the seat had a turn."""
        first = await super().begin(task, seed=seed, context=context)
        return replace(first, terminated=self._turn() is None)

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetReturn:
        """Begin a game, and let the others move until it is this seat's turn."""
        game_seed = int(str(self.task.get("seed", seed)))
        named = self.task.get("seat")
        self.seat = self.seats[game_seed % len(self.seats)] if named is None else str(named)
        if self.seat not in self.seats:
            raise TaskError(f"there is no seat {self.seat!r}", remedy=f"there are: {', '.join(self.seats)}")
        self._together, self._left, self._result, self._paid = {}, "", None, False
        # The members of a group share the seed of the episode, so chance plays the same against each of them.
        own = derive_seed(self.context.seed, "opponents")
        players = players_of(
            self.opponents, self.seats, self.seat, self.system_prompt, seed=own, policy=self._policy_plays
        )
        self._players = players
        self._rngs = {other: random.Random(derive_seed(own, other, "moves")) for other in self.seats}
        self.start(self.task, game_seed)
        await self._let_others_move()
        return self._tell(self.seat), {"seat": self.seat}

    async def step(self, action: str) -> StepReturn:
        """Play a move, and let the others move until it is this seat's turn again."""
        if self._turn() is None:
            raise EnvironmentMisuse(f"{self.env_id}: the game was over before seat {self.seat} had a turn")
        self.act(self.seat, action)
        await self._let_others_move()
        told = self._tell(self.seat)
        if self._turn() is not None:
            return told, 0.0, False, False, {"seat": self.seat}
        rewards = self._settle()
        self._paid = True
        return told, rewards[self.seat], True, False, {"seat": self.seat, "seat_rewards": rewards}

    async def finish(self, stop_reason: str) -> float:
        """Return the reward of a game that no step of this seat has ended; a seat that was cut leaves it."""
        if self._paid:
            return 0.0
        if self._turn() is not None:
            self._leave(self.seat)
        return self._settle()[self.seat]

    # The seats of one game ------------------------------------------------------------------

    async def _let_others_move(self) -> None:
        for _ in range(MAX_MOVES):
            seat = self._turn()
            if seat is None or seat == self.seat:
                return
            move = Move(seat, self.observe(seat), self.choices(seat), self._rngs[seat])
            text = await self._players[seat].move(move)
            if text is not None:
                self.act(seat, text)
            elif not self._left:
                self._leave(seat)
        raise EnvironmentMisuse(
            f"{self.env_id}: after {MAX_MOVES} moves of opponents it is still not seat {self.seat}'s turn"
        )

    def _turn(self) -> str | None:
        """Return the seat whose turn it is; None if the game is over, also because a seat left it."""
        return None if self._left else self.turn()

    def _tell(self, seat: str) -> str:
        """Return what a seat is told at its turn and at the end."""
        return f"The game is over: {self._left} has left it." if self._left else self.observe(seat)

    def _policy_plays(self, seat: str) -> Opponent:
        open_seat = seat_opener.get()
        if open_seat is None:
            raise UsageError(
                f"the policy cannot play the seat {seat} too, because no runner plays this episode",
                remedy="name another opponent, or let agentenv.runner.Runner play the game",
            )
        self._together[seat] = env = SeatEnv(seat, self.system_prompt, self._leave)
        return PolicySeat(env, open_seat)

    def _leave(self, seat: str) -> float:
        """End the game because the episode of a seat was cut, and return the seat's reward."""
        if self._result is None:
            self._left = seat
            self._result = _rewards_of(self.abandon(seat))
        return self._result[seat]

    def _settle(self) -> dict[str, float]:
        """Return the rewards of the game, and tell the policy's other seats that it is over."""
        if self._result is None:
            self._result = _rewards_of(self.rewards())
        while self._together:
            seat, env = self._together.popitem()
            env.close_game(self._tell(seat), self._result[seat])
        return dict(self._result)


def _rewards_of(rewards: Mapping[str, float]) -> dict[str, float]:
    return {seat: float(reward) for seat, reward in rewards.items()}


def for_each_seat(tasks: Iterable[Mapping[str, object]], seats: Sequence[str]) -> list[dict[str, object]]:
    """Return each task once for each seat, for a set that trains or evaluates all seats."""
    rows: list[dict[str, object]] = []
    for task in tasks:
        for seat in seats:
            named = {"id": f"{task['id']}-{seat}"} if "id" in task else {}
            rows.append({**task, **named, "seat": seat})
    return rows
