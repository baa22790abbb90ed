"""Players of the other seats of a game: chance, a function, another model, or the policy itself.

A list of players is a league: each game draws one of them for each seat. The seed of the episode decides, so
all members of a group meet the same ones. `league:DIRECTORY` is the league of the checkpoints of a training.
It may be a training that still runs, so the directory is read anew for each game.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeAlias

from agentenv.core.episode_env import derive_seed
from agentenv.core.errors import UsageError
from agentenv.core.messages import Message
from agentenv.engine.ask import TextModel
from agentenv.engine.interface import Sampling

__all__ = ["SELF", "Move", "Opponent", "OpponentLike", "opponent_of", "players_of"]

SELF = "self"
"""Name of the policy itself as the player of another seat."""
_LEAGUE = "league:"


@dataclass(frozen=True, slots=True)
class Move:
    """What a player knows when it is its turn."""

    seat: str
    observation: str
    """What the seat was told since its last turn."""
    choices: Sequence[str]
    """Texts that are valid moves; empty if the game does not say."""
    rng: random.Random
    """Random generator of the seat in this game."""


class Opponent(Protocol):
    """Plays one seat in one game."""

    async def move(self, move: Move) -> str | None:
        """Return the text of the next move; None if the player has left the game."""
        ...


OpponentLike: TypeAlias = "str | TextModel | Callable[[Move], str] | Sequence[OpponentLike]"
"""`self`, `random`, a model string such as `hf:PATH` or `openai:NAME`, `league:DIRECTORY`, a model, a
function of the move, or a list of these, of which each game draws one."""


def opponent_of(player: OpponentLike, system_prompt: str, seed: int) -> Opponent:
    """Return the player of a seat for one game.

    Args:
        player: who plays; not `self`, and no list.
        system_prompt: system message of a model.
        seed: seed of a model's answers.

    Raises:
        UsageError: It is none of these.
        ModelNotFound, DependencyMissing, EngineUnavailable: The model cannot be loaded.
    """
    if player == "random":
        return _Chance()
    if isinstance(player, str):
        return _Model(_loaded(player), system_prompt, seed)
    if isinstance(player, TextModel):
        return _Model(player, system_prompt, seed)
    if callable(player):
        return _Function(player)
    raise UsageError(
        f"{player!r:.200} cannot play a seat", remedy="name a model, pass 'random', or a function of the move"
    )


@lru_cache(maxsize=8)
def _loaded(model: str) -> TextModel:
    """Load a model once for all games of this process."""
    return TextModel.load(model, role="an opponent")


class _Chance:
    async def move(self, move: Move) -> str:
        if not move.choices:
            raise UsageError(
                f"nobody knows which moves the seat {move.seat} has, so none can be drawn",
                remedy="write choices(seat), or name a model as the opponent",
            )
        return move.rng.choice(list(move.choices))


class _Function:
    def __init__(self, function: Callable[[Move], str]) -> None:
        self._function = function

    async def move(self, move: Move) -> str:
        return self._function(move)


class _Model:
    """A model with a conversation of its own, in which it sees only what its seat is told."""

    def __init__(self, model: TextModel, system_prompt: str, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._messages: list[Message] = (
            [{"role": "system", "content": system_prompt}] if system_prompt else []
        )

    async def move(self, move: Move) -> str:
        self._messages.append({"role": "user", "content": move.observation})
        seed = derive_seed(self._seed, move.seat, len(self._messages))
        answer = await self._model.ask(self._messages, Sampling(max_tokens=256, seed=seed))
        self._messages.append({"role": "assistant", "content": answer.text})
        return answer.text


def players_of(
    opponents: OpponentLike | Mapping[str, OpponentLike],
    seats: Sequence[str],
    seat: str,
    system_prompt: str,
    *,
    seed: int,
    policy: Callable[[str], Opponent],
) -> dict[str, Opponent]:
    """Return a player for each seat but the one of the episode.

    Args:
        opponents: who plays, or who plays each seat.
        seats: all seats of the game.
        seat: the seat of the episode.
        system_prompt: system message of a model.
        seed: seed of the draws from a league, and of the models' answers.
        policy: makes the player of a seat that the policy itself plays.

    Raises:
        UsageError: A seat has no player, or a league is empty.
    """
    named = opponents if isinstance(opponents, Mapping) else dict.fromkeys(seats, opponents)
    without = [other for other in seats if other != seat and other not in named]
    if without:
        raise UsageError(
            f"the seat {without[0]} has no player", remedy=f"name one in opponents, for {', '.join(seats)}"
        )
    players: dict[str, Opponent] = {}
    for other in seats:
        if other == seat:
            continue
        player = _drawn(named[other], random.Random(derive_seed(seed, other, "league")))
        own = derive_seed(seed, other)
        players[other] = policy(other) if player == SELF else opponent_of(player, system_prompt, own)
    return players


def _drawn(player: OpponentLike, rng: random.Random) -> OpponentLike:
    """Return who plays a seat in this game: for a league, the member that is drawn."""
    if isinstance(player, str) and player.startswith(_LEAGUE):
        return rng.choice(_checkpoints(Path(player.removeprefix(_LEAGUE))))
    if isinstance(player, str | TextModel) or not isinstance(player, Sequence):
        return player
    if not player:
        raise UsageError("a list of opponents is empty", remedy="name at least one player")
    return _drawn(rng.choice(player), rng)


def _checkpoints(directory: Path) -> list[str]:
    """Return the models of a league: the checkpoints of a run, or the policy while there is none.

    Raises:
        UsageError: There is no such directory.
    """
    if not directory.is_dir():
        raise UsageError(
            f"there is no directory {directory} to take opponents from",
            remedy="name the directory of a run, or of a training's checkpoints",
        )
    checkpoints = sorted(
        path
        for path in (*directory.glob("*/"), *directory.glob("checkpoints/*/"))
        if (path / "config.json").is_file()
    )
    return [f"hf:{path}" for path in checkpoints] or [SELF]
