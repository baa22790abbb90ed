"""Classic games of PettingZoo whose positions are short texts, for example `pettingzoo:connect_four_v3`.

The games are PettingZoo's AEC environments. A seat is an agent, an action is named in words, and what an
agent observes is told in words. The policy plays one seat or several; see `agentenv.envs.multi_env`. Rewards
are the game's, added up. A text that names no legal action loses the game, at the highest stake.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.core import DependencyMissing, install_line
from agentenv.envs import MultiEnv, OpponentLike
from agentenv_worlds.names import check_known

__all__ = ["GAMES", "PettingZoo", "seats_of"]

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class _Game:
    """What the adapter must know of a game."""

    seats: tuple[str, ...]
    rules: str
    actions: tuple[str, ...]
    """Name of each action, in the order of their numbers."""
    told: Callable[[Any, int], str]
    """Says what an agent observes; its arguments are the bare environment and the agent's index."""
    stake: float
    """The most that an agent can lose."""


def _grid(rows: Sequence[Sequence[object]]) -> str:
    return "\n".join(" ".join(map(str, row)) for row in rows)


def _tic_tac_toe(bare: Any, agent: int) -> str:
    marks = ["XO"[int(mark) - 1] if mark else str(number) for number, mark in enumerate(bare.board.squares)]
    return f"You are {'XO'[agent]}.\n{_grid([marks[at : at + 3] for at in (0, 3, 6)])}"


def _connect_four(bare: Any, agent: int) -> str:
    seen = bare.observe(bare.agents[agent])["observation"]
    own, other = seen[:, :, 0], seen[:, :, 1]
    cells = [
        ["X" if own[row, column] else "O" if other[row, column] else "." for column in range(7)]
        for row in range(6)
    ]
    return f"Your discs are X.\n{_grid([*cells, range(7)])}"


def _cards(bare: Any, agent: int) -> str:
    state = bare.env.get_state(agent)["raw_obs"]
    hand = state["hand"] if isinstance(state["hand"], str) else " ".join(state["hand"])
    public = state.get("public_card") or " ".join(state.get("public_cards") or ())
    others = [int(chips) for player, chips in enumerate(state["all_chips"]) if player != agent]
    return (
        f"Your hand: {hand}. Public: {public or 'none'}. "
        f"Chips in the pot: yours {int(state['my_chips'])}, the other's {others[0]}."
    )


def _hands(bare: Any, agent: int) -> str:
    last = int(bare.observe(bare.agents[agent]))
    hands = ("rock", "paper", "scissors")
    return f"The other showed {hands[last]}." if last < len(hands) else "A new round."


_TWO = ("player_0", "player_1")
_BETS = ("call", "raise", "fold", "check")

GAMES: Mapping[str, _Game] = {
    "tictactoe_v3": _Game(
        ("player_1", "player_2"),
        "Tic-tac-toe: three in a row win. Answer with the number of a free cell.",
        tuple(map(str, range(9))),
        _tic_tac_toe,
        1.0,
    ),
    "connect_four_v3": _Game(
        _TWO,
        "Connect four: four in a line win. Answer with the number of a column, into which your disc falls.",
        tuple(map(str, range(7))),
        _connect_four,
        1.0,
    ),
    "leduc_holdem_v4": _Game(
        _TWO,
        "Leduc hold'em: one card each, one public card in the second round; a pair wins, then the higher of "
        "J < Q < K. Answer with an action.",
        _BETS,
        _cards,
        7.0,
    ),
    "texas_holdem_v4": _Game(
        _TWO, "Limit Texas hold'em for two. Answer with an action.", _BETS, _cards, 24.0
    ),
    "texas_holdem_no_limit_v6": _Game(
        _TWO,
        "No-limit Texas hold'em for two. Answer with an action.",
        ("fold", "check_call", "raise_half_pot", "raise_pot", "all_in"),
        _cards,
        100.0,
    ),
    "rps_v2": _Game(
        _TWO,
        "Rock, paper, scissors over 15 rounds. Answer rock, paper or scissors.",
        ("rock", "paper", "scissors"),
        _hands,
        15.0,
    ),
}
"""The games that can be told in short texts, by PettingZoo's names."""


def seats_of(game: str) -> tuple[str, ...]:
    """Return the agents of a game, without starting it.

    Raises:
        UnknownEnvironment: The game is not among those that are told in texts.
        DependencyMissing: A package that the game needs is not installed.
    """
    check_known("PettingZoo has no game that is told in short texts and named", game, GAMES)
    _module(game)
    return GAMES[game].seats


def _module(game: str) -> Any:
    try:
        return importlib.import_module(f"pettingzoo.classic.{game}")
    except ImportError as error:
        raise DependencyMissing(
            f"pettingzoo:{game} needs a package that is not installed: {error}",
            remedy=install_line("pettingzoo"),
        ) from error


class PettingZoo(MultiEnv):
    """A classic game of PettingZoo.

    Args:
        game: PettingZoo's name of the game, such as `leduc_holdem_v4`.
        opponents: who plays the other seats; `random` plays a legal action.

    Raises:
        UnknownEnvironment: The game is not among those that are told in texts.
        DependencyMissing: A package that the game needs is not installed.
    """

    def __init__(self, game: str, opponents: OpponentLike | Mapping[str, OpponentLike] = "random") -> None:
        self.seats = seats_of(game)
        super().__init__(opponents)
        self.game = game
        self.full_marks = self._rules.stake
        self.system_prompt = self._rules.rules
        self._inner: Any = None
        self._total: dict[str, float] = {}
        self._fault = ""

    @property
    def _rules(self) -> _Game:
        return GAMES[self.game]

    def start(self, task: Mapping[str, object], seed: int) -> None:
        """Deal a new game of this seed."""
        self._inner = _module(self.game).env()
        self._inner.reset(seed=seed % 2**31)
        self._total, self._fault = dict.fromkeys(self.seats, 0.0), ""

    def turn(self) -> str | None:
        """Return the agent that PettingZoo has selected; None if the game is over."""
        inner = self._inner
        ended = [inner.terminations[agent] or inner.truncations[agent] for agent in inner.agents]
        return None if self._fault or all(ended) else str(inner.agent_selection)

    def observe(self, seat: str) -> str:
        """Tell what the agent observes, and at its turn its legal actions."""
        told = self._rules.told(self._inner.unwrapped, self.seats.index(seat))
        return f"{told}\nActions: {', '.join(self.choices(seat))}." if self.turn() == seat else told

    def choices(self, seat: str) -> Sequence[str]:
        """Return the legal actions of an agent."""
        seen: Any = self._inner.observe(seat)
        names = self._rules.actions
        if not isinstance(seen, dict):
            return names
        return [name for name, legal in zip(names, seen["action_mask"], strict=True) if legal]

    def act(self, seat: str, text: str) -> None:
        """Play the last word of the text that names an action; a text without a legal one loses."""
        named = [word for word in _WORD.findall(text.casefold()) if word in self._rules.actions]
        if not named or named[-1] not in self.choices(seat):
            self._fault = seat
            return
        self._inner.step(self._rules.actions.index(named[-1]))
        for agent, reward in self._inner.rewards.items():
            self._total[agent] += float(reward)

    def rewards(self) -> Mapping[str, float]:
        """Return the rewards of the agents, added up over the game."""
        return self.abandon(self._fault) if self._fault else self._total

    def abandon(self, seat: str) -> Mapping[str, float]:
        """Return the rewards if an agent does not play on: it loses the highest stake."""
        stake = self._rules.stake
        return {other: -stake if other == seat else stake for other in self.seats}

    def close(self) -> None:
        """Close the game."""
        if self._inner is not None:
            self._inner.close()
