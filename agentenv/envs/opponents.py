"""Players of the seats that the policy does not play: by chance, by a function, or by another model."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias

from agentenv.core.errors import UsageError
from agentenv.core.messages import Message
from agentenv.core.seeds import derive_seed
from agentenv.engine.ask import TextModel
from agentenv.engine.base import Sampling

__all__ = ["Move", "Opponent", "OpponentLike", "opponent_of"]


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

    async def move(self, move: Move) -> str:
        """Return the text of the next move."""
        ...


OpponentLike: TypeAlias = "str | TextModel | Callable[[Move], str]"
"""`random`, a model string such as `hf:PATH` or `openai:NAME`, a model, or a function of the move."""


def opponent_of(player: OpponentLike, system_prompt: str, seed: int) -> Opponent:
    """Return the player of a seat for one game.

    Args:
        player: who plays.
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
    seed: int,
) -> dict[str, Opponent]:
    """Return a player for each seat but the policy's.

    Raises:
        UsageError: A seat has no player.
    """
    named = opponents if isinstance(opponents, Mapping) else dict.fromkeys(seats, opponents)
    without = [other for other in seats if other != seat and other not in named]
    if without:
        raise UsageError(
            f"the seat {without[0]} has no player", remedy=f"name one in opponents, for {', '.join(seats)}"
        )
    return {
        other: opponent_of(named[other], system_prompt, derive_seed(seed, other))
        for other in seats
        if other != seat
    }
