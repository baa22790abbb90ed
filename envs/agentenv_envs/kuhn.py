"""Kuhn poker, the smallest poker game: three cards, one round, two players.

Both players put one chip into the pot and get one of the cards J, Q and K. Then they pass or bet one more
chip: a pass after a bet gives the pot away, and otherwise the higher card wins it. There are six deals and
twelve situations in which a player moves, so `exploitability` is computed exactly. It is 0 for the best
possible play, which has to bluff, and 0.458 for moves by chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from statistics import fmean

import agentenv as ae
from agentenv.core import Message
from agentenv.envs import for_each_seat

__all__ = ["SITUATIONS", "KuhnPoker", "deals", "exploitability", "messages_at"]

_CARDS = "JQK"
_DEALS = tuple(permutations(_CARDS, 2))
_ENDS = ("pp", "bp", "bb", "pbp", "pbb")
_WORDS = {"p": "pass", "b": "bet"}
_FAULT = -2.0

SITUATIONS = tuple(card + moves for card in _CARDS for moves in ("", "pb", "p", "b"))
"""All situations in which a player moves: the own card and the moves so far, `p` for pass and `b` for bet."""


def deals() -> list[dict[str, object]]:
    """Return a task for each deal and each seat."""
    rows = [{"id": f"{first}{second}", "seed": n} for n, (first, second) in enumerate(_DEALS)]
    return for_each_seat(rows, KuhnPoker.seats)


class KuhnPoker(ae.MultiEnv):
    """Kuhn poker; the rewards are the chips that a seat wins. A move that is none loses two."""

    seats = ("first", "second")
    full_marks = 2.0
    system_prompt = "Kuhn poker with J < Q < K. Answer pass or bet."

    def start(self, task: Mapping[str, object], seed: int) -> None:
        """Deal the cards."""
        self.cards = _DEALS[seed % len(_DEALS)]
        self.moves = ""
        self.fault = ""

    def turn(self) -> str | None:
        """Return the seat that moves; None if the game is over."""
        return None if self.fault or self.moves in _ENDS else self.seats[len(self.moves) % 2]

    def observe(self, seat: str) -> str:
        """Tell a seat its card and all moves."""
        return _told(self.cards[self.seats.index(seat)] + self.moves)

    def choices(self, seat: str) -> Sequence[str]:
        """Return the two moves."""
        return tuple(_WORDS.values())

    def act(self, seat: str, text: str) -> None:
        """Pass or bet; anything else loses the game."""
        move = text.strip().casefold()
        if move in _WORDS.values():
            self.moves += move[0]
        else:
            self.fault = seat

    def rewards(self) -> Mapping[str, float]:
        """Return the chips that each seat wins."""
        if self.fault:
            return self.abandon(self.fault)
        won = _won(0, *self.cards, self.moves)
        return {"first": won, "second": -won}

    def abandon(self, seat: str) -> Mapping[str, float]:
        """Return the rewards if a seat does not play on: it loses as much as any game can cost."""
        return {other: _FAULT if other == seat else -_FAULT for other in self.seats}


def messages_at(situation: str) -> list[Message]:
    """Return the conversation of a player in one of the `SITUATIONS`."""
    messages: list[Message] = [{"role": "system", "content": KuhnPoker.system_prompt}]
    if situation.endswith("pb"):  # the player passed before
        messages.append({"role": "user", "content": _told(situation[0])})
        messages.append({"role": "assistant", "content": _WORDS["p"]})
    return [*messages, {"role": "user", "content": _told(situation)}]


def exploitability(bets: Mapping[str, float]) -> float:
    """Return what an opponent who knows the player wins of it in a game, as a mean over both seats.

    Args:
        bets: for each of the `SITUATIONS`, the probability with which the player bets.
    """
    return fmean(
        _best(bets, seat, card, "", {other: 0.5 for other in _CARDS if other != card})
        for seat in (0, 1)
        for card in _CARDS
    )


def _best(bets: Mapping[str, float], seat: int, card: str, moves: str, reach: Mapping[str, float]) -> float:
    """Return what the best response wins with a card; `reach` has the chance of each card of the other."""
    if moves in _ENDS:
        pairs = {other: (card, other) if seat == 0 else (other, card) for other in reach}
        return sum(chance * _won(seat, *pairs[other], moves) for other, chance in reach.items())
    if len(moves) % 2 == seat:
        return max(_best(bets, seat, card, moves + move, reach) for move in _WORDS)
    bet = {other: chance * bets[other + moves] for other, chance in reach.items()}
    passed = {other: chance - bet[other] for other, chance in reach.items()}
    return _best(bets, seat, card, moves + "b", bet) + _best(bets, seat, card, moves + "p", passed)


def _won(seat: int, first: str, second: str, moves: str) -> float:
    """Return the chips that a seat wins."""
    if moves in {"bp", "pbp"}:  # the one who passed last has given up
        won = 1.0 if moves == "bp" else -1.0
    else:
        chips = 2.0 if moves.endswith("bb") else 1.0
        won = chips if _CARDS.index(first) > _CARDS.index(second) else -chips
    return won if seat == 0 else -won


def _told(situation: str) -> str:
    moves = ", ".join(_WORDS[move] for move in situation[1:])
    return f"You have {situation[0]}." + (f" So far: {moves}." if moves else "")


ae.register(
    "agentenv/KuhnPoker-v0",
    KuhnPoker,
    tasks={"train": deals},
    max_turns=3,
    description="Kuhn poker for two: the smallest game with bluffs, and with an exact measure of play.",
)
