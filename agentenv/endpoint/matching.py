"""Find what of a request was recorded: the deepest reply that the request's conversation goes on from.

Each reply is filed under a digest of the whole conversation that led to it, in canonical form. A request is
looked up by the digests of its own beginnings, so foreign messages in it do no harm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, TypeAlias, cast

from agentenv.core.messages import JsonValue, Message, ToolCall, text_of
from agentenv.endpoint.canonical import (
    begins,
    canonical,
    digest,
    echoes_of,
    is_same,
    next_digest,
    renumbered,
    said_beside,
)

__all__ = ["Cause", "Match", "Node", "ReplyTree"]

Cause: TypeAlias = Literal["tools", "system", "edited"]
"""What a client changed, so that a request goes on from no recorded reply."""


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """One recorded reply of the model."""

    turn: int
    """Number of the reply in the order in which replies were recorded."""
    sequence: int
    start: int
    end: int
    """The reply is the tokens from `start` to `end` of the sequence."""
    reply: Message
    """The message as the client was sent it, with the text before it if the client began the reply."""
    calls: tuple[ToolCall, ...] = ()
    """The calls with the ids that the model's tokens say; the client may have been sent others."""
    history: Sequence[Message] = ()
    """The conversation before the reply, as the client sent it."""


@dataclass(frozen=True, slots=True)
class Match:
    """What of a request was recorded."""

    key: bytes
    """Digest of the whole request."""
    node: Node | None
    """The deepest reply that the request goes on from; None if there is none."""
    rest: Sequence[Message]
    """Messages of the request after that reply."""
    ambiguous: bool = False
    """True if several equal replies were recorded, of which `node` is the newest."""
    cut: Message | None = None
    """The reply as the client sent it back if that is only the beginning of the reply's text."""

    @property
    def extends(self) -> bool:
        """True if only messages of others follow the reply, so that its tokens can be appended to."""
        foreign = any(message["role"] == "assistant" for message in self.rest)
        return self.node is not None and bool(self.rest) and not foreign


@dataclass(slots=True, eq=False)
class _Read:
    """A request that was read, so that the next one, which begins with the same messages, is read faster."""

    tools: Sequence[Mapping[str, JsonValue]]
    messages: Sequence[Message]
    keys: list[bytes]
    """Digest of the tools, and of each beginning of the messages."""


@dataclass(slots=True)
class ReplyTree:
    """The recorded replies of a session, by the conversations that led to them."""

    _index: dict[bytes, list[tuple[Node, Message]]] = field(
        default_factory=dict[bytes, "list[tuple[Node, Message]]"]
    )
    """Replies by the conversations that end with them, each with the form in which it stands there."""
    _roots: dict[bytes, None] = field(default_factory=dict[bytes, None])
    """Digests of the tools of all requests."""
    _asked: dict[bytes, list[Node]] = field(default_factory=dict[bytes, "list[Node]"])
    """Replies by the digest of the request."""
    _ids: set[str] = field(default_factory=set[str])
    """Ids of the calls of all replies."""
    _latest: list[Node] = field(default_factory=list[Node])
    """The last replies."""
    _reads: list[_Read] = field(default_factory=list[_Read])

    KEPT_READS = 8
    """Requests that are kept to compare the next one with; few agents lead more conversations at once."""

    KEPT_REPLIES = 64
    """Replies with which a request is compared to tell what of it was changed."""

    def find(self, tools: Sequence[Mapping[str, JsonValue]], messages: Sequence[Message]) -> Match:
        """Return what of a request was recorded."""
        keys = self._keys(tools, messages)
        self._roots[keys[0]] = None
        # From the end, because the deepest reply leaves the least to render, and keeps the most sampled
        # tokens.
        for index in range(len(messages) - 1, -1, -1):
            if messages[index]["role"] == "assistant":
                nodes = self._nodes(keys[index + 1], messages[index])
                if nodes:
                    return Match(keys[-1], nodes[-1], messages[index + 1 :], len(nodes) > 1)
                # No whole reply stands there. Some clients cut a reply at a text of their own and send the
                # beginning back.
                for node in reversed(self._asked.get(keys[index], ())):
                    if begins(node.reply, messages[index]):
                        return Match(keys[-1], node, messages[index + 1 :], cut=messages[index])
        return Match(keys[-1], None, messages)

    def restored(
        self, tools: Sequence[Mapping[str, JsonValue]], messages: Sequence[Message]
    ) -> Sequence[Message]:
        """Return messages with the ids that calls were sent with, where a client wrote others."""
        made = (call["id"] for message in messages for call in message.get("tool_calls") or ())
        if self._ids.issuperset(made):
            return messages
        restored: list[Message] = []
        ids: dict[str, str] = {}
        key = digest(*sorted(tools, key=str))
        for message in messages:
            mended = message
            if (answered := message.get("tool_call_id")) in ids:
                mended = cast("Message", {**message, "tool_call_id": ids[answered]})
            elif (calls := message.get("tool_calls")) and next_digest(key, message) not in self._index:
                sent = (renumbered(node.reply, message) for node in reversed(self._asked.get(key, ())))
                new = next(filter(None, sent), {})
                ids |= new
                known = [{**call, "id": new.get(call["id"], call["id"])} for call in calls]
                mended = cast("Message", {**message, "tool_calls": known})
            restored.append(mended)
            key = self._next_key(key, mended)
        return restored

    def add(self, key: bytes, node: Node, *, stop: str | None = None, begun: Sequence[Message] = ()) -> None:
        """File a reply.

        Args:
            key: digest of the request.
            node: the reply.
            stop: the stop string that ended the reply, which some clients put back at its end.
            begun: the message with which the client began the reply; some keep it and the rest apart.
        """
        self._asked.setdefault(key, []).append(node)
        self._ids.update(call["id"] for call in node.reply.get("tool_calls") or ())
        self._latest = [*self._latest[1 - self.KEPT_REPLIES :], node]
        forms = [node.reply]
        if stop is not None:
            forms.append({**node.reply, "content": text_of(node.reply) + stop})
        places = [(next_digest(key, form), form) for form in forms]
        for message in begun:
            rest: Message = {**node.reply, "content": text_of(node.reply)[len(text_of(message)) :]}
            places.append((next_digest(self._next_key(key, message), rest), rest))
        # One reply may be filed in several places, because it is not known which form the client will send
        # back.
        for place, form in places:
            self._index.setdefault(place, []).append((node, form))

    def cut(self, node: Node, returned: Message) -> None:
        """File a reply by the beginning of its text that a client kept, and by its whole no more."""
        key = next(key for key, nodes in self._asked.items() if node in nodes)
        # Otherwise a later request with the whole reply would go on from tokens that this client never kept.
        for kept in self._index.values():
            kept[:] = [entry for entry in kept if entry[0] is not node]
        self._index = {place: kept for place, kept in self._index.items() if kept}
        self._index.setdefault(next_digest(key, returned), []).append((node, returned))

    def changed_in(self, match: Match, messages: Sequence[Message]) -> Cause:
        """Return what keeps a request from going on from a deeper reply in its history than it does."""
        first = len(messages) - len(match.rest)
        # If the same messages match under the tools of an earlier request, only the tools can have changed.
        for root in self._roots:
            key = root
            for index, message in enumerate(messages):
                key = self._next_key(key, message)
                if index >= first and message["role"] == "assistant" and self._nodes(key, message):
                    return "tools"
        spoken, first = _spoken(messages), len(_spoken(messages[:first]))
        if any(_goes_on(spoken, first, node) for node in self._latest):
            return "system"
        return "edited"

    def _nodes(self, key: bytes, returned: Message) -> list[Node]:
        return [node for node, form in self._index.get(key, ()) if is_same(form, returned)]

    def _keys(self, tools: Sequence[Mapping[str, JsonValue]], messages: Sequence[Message]) -> list[bytes]:
        """Return the digests of the tools and of each beginning of the messages."""
        known = self._longest_read(tools, messages)
        # Sorted, because the order of the tools changes nothing of what the client may call.
        keys = [digest(*sorted(tools, key=str))] if known is None else list(known.keys)
        for message in islice(messages, len(keys) - 1, None):
            keys.append(self._next_key(keys[-1], message))
        if known is not None:
            self._reads.remove(known)
        self._reads = [*self._reads[1 - self.KEPT_READS :], _Read(tools, messages, keys)]
        return keys

    def _next_key(self, before: bytes, message: Message) -> bytes:
        key = next_digest(before, message)
        if message["role"] != "assistant":
            return key
        if key in self._index:
            # What was changed makes another message, for this reply and for all that follow it.
            return key if self._nodes(key, message) else digest(key.hex(), *said_beside(message))
        # The digest of what was sent stands for its echo, so that all digests after it agree, too.
        echoes = (next_digest(before, echo) for echo in echoes_of(message))
        return next((echo for echo in echoes if echo in self._index), key)

    def _longest_read(
        self, tools: Sequence[Mapping[str, JsonValue]], messages: Sequence[Message]
    ) -> _Read | None:
        """Return the longest earlier request with which this one begins.

        Comparing messages is much cheaper than writing each as JSON again for its digest.
        """
        for read in sorted(self._reads, key=lambda read: -len(read.messages)):
            size = len(read.messages)
            # The last message differs most often, so it is compared first.
            if not 0 < size <= len(messages) or messages[size - 1] != read.messages[-1]:
                continue
            if read.tools == tools and messages[:size] == read.messages:
                return read
        return None


def _spoken(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message["role"] != "system"]


def _goes_on(spoken: Sequence[Message], first: int, node: Node) -> bool:
    """Return whether messages go on from a reply at `first` or later, but for messages of the system."""
    past = _spoken(node.history)
    place = len(past)
    if not first <= place < len(spoken) or not is_same(node.reply, spoken[place]):
        return False
    both = zip([*past, node.reply], spoken, strict=False)
    return all(canonical(own) == canonical(other) for own, other in both)
