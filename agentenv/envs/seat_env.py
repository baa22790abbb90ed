"""A further seat of a game that the policy plays: the environment of its episode, and the player of the seat.

The game runs in a `MultiEnv`, in the episode of another seat. Both episodes are on one event loop: the game
waits for the seat's move, and the seat's episode waits for what the game tells it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from agentenv.core.episode_env import Action, Context, Outcome, ResetResult, StepResult
from agentenv.core.errors import EnvironmentMisuse
from agentenv.core.messages import JsonValue, Message, text_of
from agentenv.core.seats import OpenSeat
from agentenv.envs.opponents import Move

__all__ = ["PolicySeat", "SeatEnv"]


class SeatEnv:
    """The environment of the episode of a further seat.

    Args:
        seat: name of the seat.
        system_prompt: system message of the episode; empty means none.
        leave: tells the game that the seat's episode was cut, and returns the seat's reward.
    """

    # Invariant: `_move` is pending exactly while the game waits for a move of this seat.
    ends_on_text = False

    def __init__(self, seat: str, system_prompt: str, leave: Callable[[str], float]) -> None:
        self.seat = seat
        self._system_prompt = system_prompt
        self._leave = leave
        self._told: asyncio.Queue[tuple[str, float | None]] = asyncio.Queue()
        """What the game tells the seat, with the seat's reward once the game is over."""
        self._move: asyncio.Future[str | None] | None = None
        self._owed: float | None = None
        """Reward of a game that was over before the seat had a turn."""
        self._over = False

    # For the game -------------------------------------------------------------------------

    def ask(self, observation: str) -> asyncio.Future[str | None]:
        """Tell the seat that it is its turn; the future gets its move, or None if its episode was cut."""
        self._move = asyncio.get_running_loop().create_future()
        self._told.put_nowait((observation, None))
        return self._move

    def close_game(self, observation: str, reward: float) -> None:
        """Tell the seat that the game is over."""
        self._told.put_nowait((observation, reward))

    # For the runner -----------------------------------------------------------------------

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, JsonValue]]:
        """No tools: a move is a text."""
        return ()

    async def begin(self, task: Mapping[str, object], *, seed: int, context: Context) -> ResetResult:
        """Wait for the first turn of the seat."""
        told, self._owed = await self._told.get()
        self._over = self._owed is not None
        first: list[Message] = [{"role": "user", "content": told}]
        if self._system_prompt:
            first.insert(0, {"role": "system", "content": self._system_prompt})
        return ResetResult(tuple(first), terminated=self._over)

    async def advance(self, action: Action) -> StepResult:
        """Give the game the seat's move, and wait for its next turn or the end of the game."""
        move, self._move = self._move, None
        if move is None:
            raise EnvironmentMisuse(f"it is not the turn of the seat {self.seat}")
        move.set_result(text_of(action.message))
        told, reward = await self._told.get()
        self._over = reward is not None
        return StepResult(({"role": "user", "content": told},), reward=reward or 0.0, terminated=self._over)

    async def is_finished(self) -> bool:
        """Return False: a game ends by its own rules."""
        return False

    async def end(self, stop_reason: str) -> Outcome:
        """Return the reward of a seat whose episode was cut, which ends the game."""
        if self._over:
            return Outcome(self._owed or 0.0)
        self._over = True
        reward = self._leave(self.seat)
        if self._move is not None and not self._move.done():
            self._move.set_result(None)
        return Outcome(reward)

    async def shutdown(self) -> None:
        """Do nothing: the game holds whatever must be closed."""


class PolicySeat:
    """Plays a further seat with the policy.

    Args:
        env: the seat.
        open_seat: begins its episode.
    """

    def __init__(self, env: SeatEnv, open_seat: OpenSeat) -> None:
        self.env = env
        self._episode = open_seat(env.seat, env)

    async def move(self, move: Move) -> str | None:
        """Return the text of the next move; None if the seat has left the game."""
        answer = self.env.ask(move.observation)
        await self._episode.wait(answer)
        return answer.result() if answer.done() else None
