"""Ids of tool calls, which the client is sent in the form of its API and each of which is given once.

Clients tell replies apart by the ids of their calls: they drop what repeats, and some write ids anew that do
not look as those of the API. The renderer is always shown the ids that the model's tokens say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import cast

from agentenv.core.messages import CallStatus, Message, ToolCall, ToolCallMessage

__all__ = ["CallNames"]


class CallNames:
    """The ids of the calls of one session, as clients were sent them."""

    def __init__(self) -> None:
        self._tools: dict[str, str] = {}
        """Name of the tool of each call."""
        self._own: dict[str, str] = {}
        """Id in the model's tokens of each call, by the id that the client was sent."""

    def give(
        self, calls: Sequence[ToolCall], message: Message, turn: int, prefix: str
    ) -> tuple[ToolCall, ...]:
        """Give the calls of a reply ids that are unique; `message` is changed to have them too.

        Args:
            calls: the calls of the reply.
            message: the reply as the client is sent it.
            turn: number of the reply in the session.
            prefix: what the ids of calls begin with in the client's API.
        """
        # A model may write one id twice in a reply, so the new ids of each are a list.
        new: dict[str, list[str]] = {}
        given: list[ToolCall] = []
        for index, call in enumerate(calls):
            id = call.id
            if call.status is not CallStatus.IN_THINKING:
                seed = f"{call.id}/{turn}/{index}".encode("utf-8", "replace")
                id = prefix + blake2b(seed, digest_size=12).hexdigest()
                self._own[id] = call.id
            self._tools[id] = call.name
            new.setdefault(call.id, []).append(id)
            given.append(replace(call, id=id))
        if listed := message.get("tool_calls"):
            message["tool_calls"] = [
                cast("ToolCallMessage", {**call, "id": new[call["id"]].pop(0)}) for call in listed
            ]
        return tuple(given)

    def named(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages of a client with the name of the tool in each tool result."""
        return [self._named(message) for message in messages]

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return named messages as the renderer is shown them."""
        return [self._shown(message) for message in messages] if self._own else list(messages)

    def _named(self, message: Message) -> Message:
        if message["role"] != "tool" or message.get("name"):
            return message
        name = self._tools.get(message.get("tool_call_id", ""))
        return {**message, "name": name} if name else message

    def _shown(self, message: Message) -> Message:
        if message["role"] == "tool":
            id = message.get("tool_call_id", "")
            return {**message, "tool_call_id": self._own.get(id, id)}
        calls = message.get("tool_calls")
        if not calls or not any(call["id"] in self._own for call in calls):
            return message
        own = [{**call, "id": self._own.get(call["id"], call["id"])} for call in calls]
        return {**message, "tool_calls": cast("list[ToolCallMessage]", own)}
