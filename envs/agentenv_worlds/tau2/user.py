"""The user of a tau2 conversation: played by a model with tau2's guidelines, or by a script.

Both speak first, answer each message of the agent, and use the user's own tools, such as those of the phone
in `telecom`. A model ends the conversation with one of tau2's marks. The script needs no model: it says its
instructions at once, performs the next action of its part of the ground truth when the agent names it, agrees
to everything else, and ends the conversation. It is there for tests, for the oracle, and for training a first
policy; scores with it are not tau2's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

from agentenv.core import Message, ToolCall, derive_seed
from agentenv.engine import Sampling, TextModel
from agentenv.tools import Toolbox

__all__ = ["CLOSING", "ModelTau2User", "ScriptedTau2User", "Tau2User", "is_last", "user_of"]

MARKS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""Texts with which the user ends the conversation."""

CLOSING = "anything else"
"""Words of the agent after which the scripted user ends the conversation."""

MAX_AGREED = 5
"""How often the scripted user agrees before it ends the conversation."""

MAX_CALLS = 20
"""Answers with tool calls that a user may give in a row; the last one then counts as its message."""

_BEGIN = (
    "Begin the interaction. Remember you are the customer, and you are interacting with a customer service "
    "agent."
)


class Tau2User(Protocol):
    """Plays the user of one episode."""

    messages: list[Message]
    """The conversation as the user sees it: its own messages have the role of the assistant."""

    async def speak(self, heard: str | None) -> str:
        """Answer the agent's message, or open the conversation if there is none yet."""
        ...


def is_last(text: str) -> bool:
    """Return whether the user ends the conversation with this message."""
    return any(mark in text for mark in MARKS)


def user_of(
    model: str | TextModel, task: Mapping[str, Any], instructions: str, tools: Toolbox, seed: int
) -> Tau2User:
    """Return the user of an episode.

    Args:
        model: `script`, a model string, or a model.
        task: the task as tau2 has it.
        instructions: tau2's guidelines with the task's scenario.
        tools: the user's own tools.
        seed: seed of the user's model.
    """
    if model == "script":
        return ScriptedTau2User(task, tools)
    return ModelTau2User(_loaded(model) if isinstance(model, str) else model, instructions, tools, seed)


@lru_cache(maxsize=8)
def _loaded(model: str) -> TextModel:
    """Load a model once for all episodes of this process."""
    return TextModel.load(model, role="a user")


class ModelTau2User:
    """A user played by a model."""

    def __init__(self, model: TextModel, instructions: str, tools: Toolbox, seed: int) -> None:
        self._model = model
        self._tools = tools
        self._seed = seed
        self.messages: list[Message] = [
            {"role": "system", "content": instructions},
            {"role": "user", "content": _BEGIN},
        ]

    async def speak(self, heard: str | None) -> str:
        """Let the model answer; its tool calls are run until it writes a message without calls."""
        if heard is not None:
            self.messages.append({"role": "user", "content": heard})
        text = ""
        for number in range(MAX_CALLS):
            sampling = Sampling(
                temperature=0.0, max_tokens=1024, seed=derive_seed(self._seed, "user", len(self.messages))
            )
            answer = await self._model.ask(self.messages, sampling, self._tools.schemas())
            text = answer.text
            calls = _distinct(answer.tool_calls, number)
            if not calls:
                break
            said: Message = {"role": "assistant", "content": answer.message.get("content")}
            self.messages.append({**said, "tool_calls": [call.to_message() for call in calls]})
            self.messages.extend(result.to_message() for result in await self._tools.run(calls))
        self.messages.append({"role": "assistant", "content": text})
        return text


def _distinct(calls: Sequence[ToolCall], number: int) -> list[ToolCall]:
    """Give each call an id of its own, which some servers do not."""
    return [replace(call, id=f"user_{number}_{index}") for index, call in enumerate(calls)]


class ScriptedTau2User:
    """A user that says its instructions at once, and performs its actions when the agent names them."""

    def __init__(self, task: Mapping[str, Any], tools: Toolbox) -> None:
        self.messages: list[Message] = [{"role": "user", "content": _BEGIN}]
        self._tools = tools
        self._instructions = task["user_scenario"]["instructions"]
        actions = task["evaluation_criteria"].get("actions") or ()
        self._actions = [action for action in actions if action.get("requestor") == "user"]
        self._agreed = 0

    async def speak(self, heard: str | None) -> str:
        """Say the next line."""
        if heard is None:
            told = self._instructions
            text = told if isinstance(told, str) else "\n".join(str(part) for part in told.values() if part)
        else:
            self.messages.append({"role": "user", "content": heard})
            text = await self._answer(heard)
        self.messages.append({"role": "assistant", "content": text})
        return text

    async def _answer(self, heard: str) -> str:
        if self._actions and self._actions[0]["name"] in heard:
            return await self._act(self._actions.pop(0))
        self._agreed += 1
        if CLOSING in heard or self._agreed > MAX_AGREED:
            return "Thank you. ###STOP###"
        return "Yes, please go ahead."

    async def _act(self, action: Mapping[str, Any]) -> str:
        number = len(self.messages)
        name = next((name for name in self._tools.names if name.endswith(action["name"])), action["name"])
        call = ToolCall(f"user_{number}", name, json.dumps(action["arguments"]))
        calls: Message = {"role": "assistant", "content": None, "tool_calls": [call.to_message()]}
        self.messages.append(calls)
        (result,) = await self._tools.run([call])
        self.messages.append(result.to_message())
        return f"I have done that. {result.text}"
