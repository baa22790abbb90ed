"""Simulated users, which answer the model's text turns when the environment does not.

For each episode the runner makes a copy with `fresh()`, calls `start` once, `respond` after each text turn
of the model that the environment leaves unanswered, and `close` exactly once, however the episode ends. Where
the `step` of the environment returns a message, that is the answer to the turn and the user is not asked.

A user may end the episode, reward the
turn that it answers, and add rewards to earlier turns. An error in a user fails the episode; the episode is
never scored 0.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from agentenv.core.episode_env import derive_seed
from agentenv.core.errors import UsageError
from agentenv.core.messages import CallStatus, ContentPart, Message, text_of
from agentenv.core.refusals import malformed
from agentenv.engine.ask import TextModel
from agentenv.engine.interface import ChatEngine, Engine, Sampling
from agentenv.tools.content import Image
from agentenv.tools.tool import Tool
from agentenv.tools.toolbox import Toolbox

if TYPE_CHECKING:
    from agentenv.render.renderer import Renderer

__all__ = [
    "FunctionUser",
    "ModelUser",
    "ScriptedUser",
    "User",
    "UserLike",
    "UserTurn",
    "read_opening",
    "read_turn",
    "said_by",
    "user_for",
]


_MAX_ROUNDS = 8
"""How often a user that a model plays may call its tools before it has to speak."""


@dataclass(frozen=True, slots=True)
class UserTurn:
    """One answer of a user."""

    text: str | None = None
    """What the user says; None means nothing. A text with `done` is kept in the messages."""
    done: bool = False
    """True if the user ends the conversation."""
    images: Sequence[Image] = ()
    """Images that the user shows with the text, for models that see."""
    reward: float = 0.0
    """Reward of the assistant turn that this answers."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict[int, float])
    """Rewards added to earlier assistant turns, by the index of the turn."""


class User:
    """Base class of simulated users; subclasses write `respond`."""

    def fresh(self) -> User:
        """Return a copy for one episode; the original does not change."""
        return copy.copy(self)

    async def start(self, task: Mapping[str, object], *, seed: int) -> str | None:
        """Prepare for a task; a returned text is the user's opening message."""
        return None

    async def respond(self, messages: Sequence[Message]) -> UserTurn | str | None:
        """Answer the conversation so far, whose last message is the model's. The messages are a copy.

        Return text to continue the conversation, None to end it, or a `UserTurn`.
        """
        raise NotImplementedError(f"{type(self).__name__} must write respond()")

    async def close(self) -> None:
        """Free the user's resources; called exactly once."""


UserLike: TypeAlias = "User | Callable[[Mapping[str, object]], User | None] | None"
"""A user for every task, or a function that chooses a user by the task."""


def user_for(user: UserLike, task: Mapping[str, object]) -> User | None:
    """Return a fresh user for one episode of this task.

    Raises:
        UsageError: `user` is neither a user nor a function that returns one.
    """
    chosen = user if user is None or isinstance(user, User) else user(copy.deepcopy(task))
    if chosen is not None and not isinstance(chosen, User):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"{chosen!r:.200} is not a user",
            remedy="pass an agentenv.User, or a function of the task that returns one",
        )
    return None if chosen is None else chosen.fresh()


def read_opening(opening: object) -> str | None:
    """Return the result of `start`.

    Raises:
        UsageError: The result is neither text nor None.
    """
    if opening is None or isinstance(opening, str):
        return opening
    raise UsageError(f"the user opened with {opening!r:.200}", remedy="start() must return text or None")


def said_by(answer: UserTurn) -> tuple[Message, ...]:
    """Return the message of a user's answer; nothing if the user said and showed nothing."""
    if not answer.images:
        return ({"role": "user", "content": answer.text},) if answer.text else ()
    text: list[ContentPart] = [{"type": "text", "text": answer.text}] if answer.text else []
    return ({"role": "user", "content": [*text, *(image.to_part() for image in answer.images)]},)


def read_turn(answer: object) -> UserTurn:
    """Turn the result of `respond` into a `UserTurn`.

    Raises:
        UsageError: The result is neither text, nor a `UserTurn` with a text or None, nor None.
    """
    if isinstance(answer, UserTurn):
        if answer.text is not None and not isinstance(answer.text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"the user said {answer.text!r:.200}", remedy="the text of a UserTurn is a str or None"
            )
        return answer
    if answer is None:
        return UserTurn(done=True)
    if isinstance(answer, str):
        return UserTurn(answer)
    raise UsageError(
        f"the user answered {answer!r:.200}",
        remedy="return text, a UserTurn, or None to end the conversation",
    )


class ScriptedUser(User):
    """Says fixed lines, then ends the conversation.

    Args:
        lines: answers in order, each a text or a `UserTurn`.
        opening: message that the user says before the model speaks.
    """

    def __init__(self, lines: Sequence[str | UserTurn], *, opening: str | None = None) -> None:
        self._lines = tuple(lines)
        self._opening = opening
        self._said = 0

    async def start(self, task: Mapping[str, object], *, seed: int) -> str | None:
        """Go back to the first line."""
        self._said = 0
        return self._opening

    async def respond(self, messages: Sequence[Message]) -> UserTurn | str | None:
        """Say the next line; end the conversation after the last one."""
        if self._said >= len(self._lines):
            return None
        self._said += 1
        return self._lines[self._said - 1]


Responder: TypeAlias = Callable[
    [Sequence[Message], Mapping[str, object]],
    "UserTurn | str | Awaitable[UserTurn | str | None] | None",
]


class FunctionUser(User):
    """A user whose answers come from a function of the messages and the task, which may be asynchronous."""

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
    """A user played by a model that has its own prompt.

    The model sees the conversation with the roles swapped: the policy's messages are user messages to it.
    Tool calls of the policy and their results are hidden from it. It may have tools of its own, whose calls
    and results only the model itself sees, also in its later turns.

    Args:
        engine: model of the user: a `ChatEngine`, an `Engine` with its `renderer`, or a `TextModel`.
        prompt: instructions for the user; `{name}` is replaced with the task's field of that name.
        renderer: renderer of the engine, if the engine works on tokens.
        end_marker: text with which the model ends the conversation.
        opens: let the user speak first.
        sampling: sampling settings for the user's messages.
        tools: tools that the user may call before it speaks, as for `Toolbox`. All episodes share them.
    """

    def __init__(
        self,
        engine: Engine | ChatEngine | TextModel,
        prompt: str,
        *,
        renderer: Renderer | None = None,
        end_marker: str = "###STOP###",
        opens: bool = False,
        sampling: Sampling | None = None,
        tools: Iterable[Tool[..., Any] | Callable[..., Any] | str] = (),
    ) -> None:
        self._model = TextModel.of(engine, renderer, role="a user")
        self._toolbox = Toolbox(tools)
        self._called: dict[int, list[Message]] = {}
        self._prompt = prompt
        self._end_marker = end_marker
        self._opens = opens
        self._sampling = sampling or Sampling(max_tokens=256)
        self._instructions = prompt
        self._seed = 0
        self._turns = 0

    async def start(self, task: Mapping[str, object], *, seed: int) -> str | None:
        """Fill the prompt from the task; return an opening message if the user speaks first."""
        self._instructions = self._prompt
        for name, value in task.items():
            self._instructions = self._instructions.replace("{" + name + "}", str(value))
        self._seed = seed
        self._turns = 0
        self._called = {}
        return await self._speak([]) if self._opens else None

    async def respond(self, messages: Sequence[Message]) -> UserTurn | str | None:
        """Let the model answer; its end marker ends the conversation."""
        text = await self._speak(messages)
        if self._end_marker and self._end_marker in text:
            return UserTurn(text.replace(self._end_marker, "").strip() or None, done=True)
        return text

    async def _speak(self, messages: Sequence[Message]) -> str:
        called: list[Message] = []
        self._called[len(messages)] = called
        round_ = 0
        while True:
            seed = derive_seed(self._seed, "user", self._turns, *([round_] if round_ else []))
            # The last time no tool is offered, so that a model that only calls tools says something.
            tools = self._toolbox.schemas() if round_ < _MAX_ROUNDS else ()
            answer = await self._model.ask(self._seen(messages), replace(self._sampling, seed=seed), tools)
            if not answer.tool_calls or round_ == _MAX_ROUNDS:
                break
            fine = [call for call in answer.tool_calls if call.status is CallStatus.OK]
            results = {result.tool_call_id: result for result in await self._toolbox.run(fine)}
            told = [results.get(call.id) or malformed(call) for call in answer.tool_calls]
            called += [answer.message, *(result.to_message() for result in told)]
            round_ += 1
        self._turns += 1
        return answer.text

    def _seen(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation as the user's model sees it."""
        seen: list[Message] = [{"role": "system", "content": self._instructions}]
        roles = {"assistant": "user", "user": "assistant"}
        for index, message in enumerate(messages):
            seen += self._called.get(index, ())
            text = text_of(message)
            if message["role"] in roles and text:
                seen.append({"role": roles[message["role"]], "content": text})
        if seen[-1]["role"] != "user":
            # Chat templates and APIs expect the last message before an answer to be the user's.
            seen.append({"role": "user", "content": "(The assistant waits for you to speak.)"})
        return [*seen, *self._called.get(len(messages), ())]
