"""Single-player games of textarena, for example `textarena:FrozenLake-v0`.

The model's text is the move, and the game's messages are the observations. The game's reward, usually 0 to
1, is given at the end. Tasks are seeds.

textarena draws from Python's global random generator. Each episode has its own state of that generator,
which is installed during a reset or step. Only one game of a process runs at a time, so a seed also
determines an episode that is played beside others.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from agentenv.core import DependencyMissing, UsageError
from agentenv.envs import Env, Text

__all__ = ["TextArena", "games", "global_generator", "players_of", "readable", "reward_of", "started"]

MOST_PLAYERS = 6
"""Largest number of players with which a game is tried."""

_DIGITS = re.compile(r"\d{4001,}")
_one_at_a_time = threading.Lock()


class TextArena(Env):
    """A single-player game of textarena.

    Args:
        game: id of the game.

    Raises:
        UnknownEnvironment: There is no such game.
        UsageError: The game needs data that is not installed.
    """

    observation_space = Text()
    action_space = Text()

    def __init__(self, game: str) -> None:
        self.game = game
        self._inner: Any = None
        self._random: object = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Any]:
        """Start a new game from the task's seed."""
        game_seed = int(str(self.task.get("seed", seed))) % 2**31
        self._random = random.Random(game_seed).getstate()
        with self._generator():
            self._inner = started(self.game, game_seed)
            return self._heard(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play the move."""
        with self._generator():
            done, _ = self._inner.step(action=readable(action))
            told = self._heard()
            if not done:
                return told, 0.0, False, False, {}
            rewards, _ = self._inner.close()
            return told, reward_of(rewards, 0), True, False, {}

    def _heard(self) -> str:
        """Return the game's messages since the last turn, without the player's own."""
        _, said = self._inner.get_observation()
        messages: Sequence[tuple[int, str, Any]] = said
        return "\n".join(str(text) for sender, text, _ in messages if sender != 0)

    @contextmanager
    def _generator(self) -> Generator[None]:
        with global_generator(self._random) as after:
            yield
        self._random = after()


def readable(move: str) -> str:
    """Return a move whose numbers have at most 4,000 digits: Python reads no longer ones, so games raise."""
    return _DIGITS.sub(lambda digits: digits[0][:4_000], move)


def reward_of(rewards: Mapping[int, object] | None, player: int) -> float:
    """Return a player's reward; 0 where a game (Countdown, Cryptarithm) gives a text for a wrong move."""
    reward = (rewards or {}).get(player, 0.0)
    return float(reward) if isinstance(reward, (int, float)) else 0.0


@contextmanager
def global_generator(state: object) -> Generator[Callable[[], object]]:
    """Install a state of Python's global generator; the yielded function returns the state afterwards."""
    later = state
    with _one_at_a_time:
        outer = random.getstate()
        random.setstate(state)  # pyright: ignore[reportArgumentType]
        try:
            yield lambda: later
        finally:
            later = random.getstate()
            random.setstate(outer)


def _arena() -> Any:
    try:
        import textarena  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DependencyMissing(
            "textarena:GAME needs the package textarena", remedy="pip install textarena"
        ) from error
    return textarena


def games() -> list[str]:
    """Return the ids of textarena's games.

    Raises:
        DependencyMissing: textarena is not installed.
    """
    _arena()
    from textarena.envs.registration import ENV_REGISTRY  # pyright: ignore[reportMissingImports]

    return sorted(ENV_REGISTRY)


def players_of(game: str) -> int:
    """Start a game once, to find out before any episode how many players it needs.

    Raises:
        UsageError: The game cannot be started, for example because it needs data that is not installed.
    """
    alone: UsageError | None = None
    for players in range(1, MOST_PLAYERS + 1):
        try:
            with global_generator(random.Random(0).getstate()):
                started(game, 0, players)
        except UsageError as error:
            alone = alone or error
        else:
            return players
    assert alone is not None
    raise alone


def started(game: str, seed: int, players: int = 1) -> Any:
    """Make a game and start it.

    Raises:
        UsageError: It cannot be started with this number of players.
    """
    try:
        inner = _told_once(_arena().make(game))
        inner.reset(num_players=players, seed=seed)
    except Exception as error:
        # Games raise many kinds of errors, for example asserts on players or missing word lists.
        words = " ".join(str(error).split())[:200]
        raise UsageError(
            f"textarena:{game} cannot be played: {type(error).__name__}: {words}",
            remedy="choose another game; for missing data, install what the error names",
        ) from error
    return inner


def _told_once(game: Any) -> Any:
    """Remove the wrappers that repeat the conversation in each observation; those that read moves stay."""
    if not hasattr(game, "env"):
        return game
    inner = _told_once(game.env)
    if isinstance(game, _arena().ObservationWrapper):
        return inner
    game.env = inner
    return game
