"""Simulated users: who answers the model's text turns when an environment does not.

A user is a recipe until an episode starts: the runner takes a `fresh()` one for each episode, calls
`start` once, `respond` after each text turn of the model, and `close` exactly once however the
episode ends. A user may end the episode, reward the turn that it answers, and give rewards back to
earlier turns. An error in a user fails the episode; it is never scored 0.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from agentenv.core.errors import UsageError
from agentenv.core.messages import Message, text_of
from agentenv.core.seeds import derive_seed
from agentenv.engine.ask import TextModel
from agentenv.engine.base import ChatEngine, Engine, Sampling
from agentenv.render.base import RendererProtocol

__all__ = [
    "FunctionUser",
    "ModelUser",
    "ScriptedUser",
    "User",
    "UserLike",
    "UserTurn",
    "read_turn",
    "user_for",
]


@dataclass(frozen=True, slots=True)
class UserTurn:
    """What a user answered."""

    text: str | None = None
    """None says nothing; with `done` the last words are kept in the messages."""
    done: bool = False
    """The user ends the conversation."""
    reward: float = 0.0
    """For the assistant turn just answered."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict[int, float])
    """Added to the rewards of earlier assistant turns, by index."""


class User:
    """Base class of simulated users; subclasses write `respond`."""

    def fresh(self) -> User:
        """Return a user for one episode; this one stays as it is."""
        return copy.copy(self)

    async def start(self, task: Mapping[str, object], *, seed: int) -> str | None:
        """Prepare for a task; a text is the user's opening message."""
        return None

    async def respond(self, messages: Sequence[Message]) -> UserTurn | str | None:
        """Answer the conversation so far; its last message is the model's. Read only.

        Text alone goes on; None ends the conversation.
        """
        raise NotImplementedError(f"{type(self).__name__} must write respond()")

    async def close(self) -> None:
        """Free what the user holds; called exactly once."""


UserLike: TypeAlias = "User | Callable[[Mapping[str, object]], User | None] | None"
"""A user for every task, or a function that picks one by the task."""


def user_for(user: UserLike, task: Mapping[str, object]) -> User | None:
    """Return the user that plays this task, fresh for one episode.

    Raises:
        UsageError: It is neither a user nor a function that gives one.
    """
    chosen = user if user is None or isinstance(user, User) else user(task)
    if chosen is not None and not isinstance(chosen, User):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"a user is an agentenv.User or a function of the task giving one, not {chosen!r}")
    return None if chosen is None else chosen.fresh()


def read_turn(answer: object) -> UserTurn:
    """Bring what `respond` gave into one shape.

    Raises:
        UsageError: It is none of the shapes.
    """
    if isinstance(answer, UserTurn):
        return answer
    if answer is None:
        return UserTurn(done=True)
    if isinstance(answer, str):
        return UserTurn(answer)
    raise UsageError(f"a user answers with text, a UserTurn or None (the end), not {answer!r:.200}")


class ScriptedUser(User):
    """Says fixed lines, then ends the conversation.

    Args:
        lines: answers in order; a `UserTurn` may reward.
        opening: said before the model speaks.
    """

    def __init__(self, lines: Sequence[str | UserTurn], *, opening: str | None = None) -> None:
        self._lines = tuple(lines)
        self._opening = opening
        self._said = 0

    async def start(self, task: Mapping[str, object], *, seed: int) -> str | None:
        """Begin at the first line."""
        self._said = 0
        return self._opening

    async def respond(self, messages: Sequence[Message]) -> UserTurn | str | None:
        """Say the next line; after the last one, end."""
        if self._said >= len(self._lines):
            return None
        self._said += 1
        return self._lines[self._said - 1]


Responder: TypeAlias = Callable[
    [Sequence[Message], Mapping[str, object]],
    "UserTurn | str | Awaitable[UserTurn | str | None] | None",
]


class FunctionUser(User):
    """A user that is a function of the messages and the task; async ones are awaited."""

    def __init__(self, function: Responder, *, opening: str | None = None) -> None:
        self._function = function
        self._opening = opening
        self._task: Mapping[str, object] = {}

    async def start(self, task: Mapping[str, object], *, seed: int) -> str | None:
        """Remember the task."""
        self._task = task
        return self._opening

    async def respond(self, messages: Sequence[Message]) -> UserTurn | str | None:
        """Call the function."""
        answer = self._function(messages, self._task)
        if inspect.isawaitable(answer):
            return await answer
        return answer


class ModelUser(User):
    """A user played by a model with a prompt of its own.

    The model sees the conversation with the roles turned round: what the policy said is its user.
    Tool calls and results are hidden from it.

    Args:
        engine: a `ChatEngine`, or an `Engine` with `renderer`.
        prompt: the user's instructions; `{name}` is filled from the task's fields.
        renderer: for an engine on tokens.
        end_marker: a text that ends the conversation when the model writes it.
        opens: the user speaks first.
        sampling: how the user's words are drawn.
    """

    def __init__(
        self,
        engine: Engine | ChatEngine,
        prompt: str,
        *,
        renderer: RendererProtocol | None = None,
        end_marker: str = "###STOP###",
        opens: bool = False,
        sampling: Sampling | None = None,
    ) -> None:
        self._model = TextModel(engine, renderer, role="a user")
        self._prompt = prompt
        self._end_marker = end_marker
        self._opens = opens
        self._sampling = sampling or Sampling(max_tokens=256)
        self._instructions = prompt
        self._seed = 0
        self._turns = 0

    async def start(self, task: Mapping[str, object], *, seed: int) -> str | None:
        """Fill the prompt from the task; speak first if asked to."""
        self._instructions = self._prompt
        for name, value in task.items():
            self._instructions = self._instructions.replace("{" + name + "}", str(value))
        self._seed = seed
        self._turns = 0
        return await self._speak([]) if self._opens else None

    async def respond(self, messages: Sequence[Message]) -> UserTurn | str | None:
        """Let the model answer; the end marker ends the conversation."""
        text = await self._speak(messages)
        if self._end_marker and self._end_marker in text:
            return UserTurn(text.replace(self._end_marker, "").strip() or None, done=True)
        return text

    async def _speak(self, messages: Sequence[Message]) -> str:
        turned: list[Message] = [{"role": "system", "content": self._instructions}]
        roles = {"assistant": "user", "user": "assistant"}
        for message in messages:
            text = text_of(message)
            if message["role"] in roles and text:
                turned.append({"role": roles[message["role"]], "content": text})
        if turned[-1]["role"] != "user":
            turned.append({"role": "user", "content": "(The assistant waits for you to speak.)"})
        sampling = replace(self._sampling, seed=derive_seed(self._seed, "user", self._turns))
        self._turns += 1
        return (await self._model.ask(turned, sampling)).text
