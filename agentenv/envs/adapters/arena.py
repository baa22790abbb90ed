"""Games of textarena for one player: `textarena:FrozenLake-v0` and others.

The model's text is the move; the game's own messages are the observations, and its reward (as a
rule 0 to 1) comes at the end. Tasks are seeds.

textarena draws from Python's global generator. Each episode gets a state of its own, put in place
for the time of a reset or step, one game at a time in a process: seeds then hold, also for
episodes played at once.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from agentenv.core.errors import DependencyMissing, UsageError
from agentenv.envs.env import Env
from agentenv.envs.spaces import Text

__all__ = ["TextArena", "games"]

_one_at_a_time = threading.Lock()


class TextArena(Env):
    """A game of textarena for one player.

    Args:
        game: id of the game.

    Raises:
        UnknownEnvironment: There is no such game.
        UsageError: The game is for more players, or needs data that is not there.
    """

    observation_space = Text()
    action_space = Text()

    def __init__(self, game: str) -> None:
        self.game = game
        self._inner: Any = None
        self._random: object = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Any]:
        """Start a new game from the task's seed."""
        own = int(str(self.task.get("seed", seed))) % 2**31
        self._random = random.Random(own).getstate()
        with self._generator():
            try:
                self._inner = _bare(_arena().make(self.game))
                self._inner.reset(num_players=1, seed=own)
            except Exception as error:
                # Games fail in ways of their own: asserts on players, missing word lists.
                words = " ".join(str(error).split())[:200]
                raise UsageError(
                    f"textarena:{self.game} cannot be played: {type(error).__name__}: {words}"
                ) from error
            return self._heard(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play the move."""
        with self._generator():
            done, _ = self._inner.step(action=action)
            told = self._heard()
            if not done:
                return told, 0.0, False, False, {}
            rewards, _ = self._inner.close()
            return told, float((rewards or {}).get(0, 0.0)), True, False, {}

    def _heard(self) -> str:
        """Return what the game said since the last turn, without the player's own words."""
        _, said = self._inner.get_observation()
        messages: Sequence[tuple[int, str, Any]] = said
        return "\n".join(text for sender, text, _ in messages if sender != 0)

    @contextmanager
    def _generator(self) -> Generator[None]:
        """Put this episode's generator in the place of the global one."""
        with _one_at_a_time:
            theirs = random.getstate()
            random.setstate(self._random)  # pyright: ignore[reportArgumentType]
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(theirs)


def _arena() -> Any:
    try:
        import textarena  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DependencyMissing("textarena:GAME needs a package", remedy="pip install textarena") from error
    return textarena


def games() -> list[str]:
    """Return the ids of textarena's games.

    Raises:
        DependencyMissing: textarena is not installed.
    """
    _arena()
    from textarena.envs.registration import ENV_REGISTRY  # pyright: ignore[reportMissingImports]

    return sorted(ENV_REGISTRY)


def _bare(game: Any) -> Any:
    """Take off the wrappers, which repeat the whole conversation in each observation."""
    while hasattr(game, "env"):
        game = game.env
    return game
