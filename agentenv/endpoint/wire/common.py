"""What the three wire formats have in common."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from agentenv.core.messages import ContentPart, JsonValue, Message
from agentenv.endpoint.request import Answer, Asked, Kind, NotAnswered, Progress

__all__ = [
    "LIST",
    "OBJECT",
    "Blocks",
    "Conversations",
    "Converted",
    "Event",
    "Head",
    "Json",
    "Stream",
    "Wire",
    "arguments_of",
    "chunks",
    "content_of",
    "given",
    "new_id",
    "role_of",
    "schema_of",
    "seed_of",
    "texts_of",
    "tokens_of",
    "with_system",
    "words",
]

Json: TypeAlias = dict[str, Any]
Event: TypeAlias = tuple[str, Json | str]
"""Name and data of an event of a stream; an empty name is not sent."""
_CHUNK_CHARS = 48
_T = TypeVar("_T")


@dataclass(slots=True)
class Converted:
    """The messages of a conversation; the next request repeats them, and they are not converted again."""

    raw: list[Any] = field(default_factory=list[Any])
    messages: list[Message] = field(default_factory=list[Message])

    def read(self, raw: list[Any], convert: Callable[[list[Any]], list[Message]]) -> list[Message]:
        """Return messages of a client in our form; those of the last request are not converted again.

        Args:
            raw: the messages as the client sent them.
            convert: returns messages in our form. Messages after those of others are converted by themselves.
        """
        size, known = len(self.raw), self.messages
        # What the model says may go on in the next message, so a part that ends with it is converted again.
        ends = bool(known) and known[-1]["role"] != "assistant"
        if ends and size <= len(raw) and raw[size - 1] == self.raw[-1] and raw[:size] == self.raw:
            messages = [*known, *convert(raw[size:])]
        else:
            messages = convert(raw)
        self.raw, self.messages = raw, messages
        return messages


class Conversations(dict[str, tuple[list[Message], Sequence[Mapping[str, JsonValue]]]]):
    """Conversations with their tools by the ids of their last replies, for clients that send only news."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Converted()
        """The conversation that is being read."""
        self.issued: dict[str, Json] = {}
        """The items of replies by their ids, for clients that name them in place of sending them."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a wire format says about an answer beside the answer itself."""

    asked: Asked
    body: Json
    """Body of the request."""
    id: str
    """Id of the answer, which never repeats."""
    items: list[Json] = field(default_factory=list[Json])
    """Items of the answer that later requests may name by their ids."""


class Stream(Protocol):
    """One answer in the course of being streamed."""

    def begin(self, progress: Progress) -> Iterator[Event]:
        """Yield the events before the first part."""
        ...

    def part(self, kind: Kind, text: str) -> Iterator[Event]:
        """Yield the events of the next part of the thinking or the text."""
        ...

    def end(self, answer: Answer) -> Iterator[Event]:
        """Yield the calls and the end of an answer, whose thinking and text were sent."""
        ...

    def failed(self, error: NotAnswered) -> Iterator[Event]:
        """Yield the end of an answer that cannot be completed."""
        ...


class Blocks(ABC):
    """An answer that is streamed in blocks: the thinking, the text, and then each call.

    Which block is open, and when it ends, is the same in both formats that have blocks.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self._kind: Kind | None = None
        """What the open block is; None if none is open."""

    @abstractmethod
    def _open(self, kind: Kind) -> Iterator[Event]:
        """Yield the beginning of a block of the thinking or the text."""

    @abstractmethod
    def _add(self, kind: Kind, text: str) -> Event:
        """Return the event of a part of the open block."""

    @abstractmethod
    def _close(self, kind: Kind, answer: Answer | None) -> Iterator[Event]:
        """Yield the end of the open block, which is the last one before the calls if there is an answer."""

    @abstractmethod
    def _call(self, call: tuple[str, str, str]) -> Iterator[Event]:
        """Yield a whole call."""

    @abstractmethod
    def _done(self, answer: Answer) -> Iterator[Event]:
        """Yield what follows the last block."""

    def part(self, kind: Kind, text: str) -> Iterator[Event]:
        """Yield the events of the next part; see `Stream.part`."""
        yield from self._turn_to(kind)
        yield self._add(kind, text)

    def end(self, answer: Answer) -> Iterator[Event]:
        """Yield the calls and the end; see `Stream.end`."""
        if not answer.text and not answer.calls:
            yield from self._turn_to("text")  # nothing came, and an answer has at least one block
        if self._kind is not None:
            yield from self._close(self._kind, answer)
        for call in answer.calls:
            yield from self._call(call)
        yield from self._done(answer)

    def _turn_to(self, kind: Kind) -> Iterator[Event]:
        # A model may think again after text, so a change of kind ends one block and begins another.
        if self._kind != kind:
            if self._kind is not None:
                yield from self._close(self._kind, None)
            self._kind = kind
            yield from self._open(kind)


class Wire(Protocol):
    """One wire format."""

    def read(self, body: Json, held: Conversations) -> Asked:
        """Return the request in a body.

        Raises:
            NotAnswered: The body asks for something that cannot be served.
            KeyError, TypeError, ValueError, AttributeError: The body does not follow the format.
        """
        ...

    def whole(self, head: Head, answer: Answer) -> Json:
        """Return an answer as one object."""
        ...

    def stream(self, head: Head) -> Stream:
        """Return what makes the events of a streamed answer."""
        ...

    def error(self, error: NotAnswered) -> Json:
        """Return an error in the form that the SDKs understand."""
        ...

    id_prefix: str
    """Prefix of the ids of answers."""
    holds: bool
    """True if a request may name the answer that it goes on from, in place of the conversation."""


def with_system(messages: list[Message], text: str) -> list[Message]:
    """Return a conversation with this system message in place of its own; an empty text changes nothing."""
    if not text:
        return messages
    # New instructions replace those of the answer that a request goes on from.
    rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
    system: Message = {"role": "system", "content": text}
    return [system, *rest]


def new_id(prefix: str) -> str:
    """Return an id that never repeats; some SDKs drop what has an id that they have seen."""
    return f"{prefix}{secrets.token_hex(12)}"


def chunks(text: str) -> Iterator[str]:
    """Yield a text in the pieces in which it is streamed."""
    for start in range(0, len(text), _CHUNK_CHARS):
        yield text[start : start + _CHUNK_CHARS]


LIST: type[list[Any]] = list
OBJECT: type[Json] = dict
_SEND: Mapping[type, str] = {bool: "true or false", OBJECT: "an object", LIST: "a list", str: "a text"}


def given(body: Json, name: str, kind: type[_T]) -> _T:
    """Return a field of a request, or what is empty if the request does not have it.

    Raises:
        NotAnswered: The field has another type.
    """
    value = body.get(name)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise NotAnswered(400, "invalid_value", f"{name} is {value!r:.80}: send {_SEND[kind]}")
    return value


def texts_of(body: Json, name: str) -> tuple[str, ...]:
    """Return the texts in a field that is a list of them.

    Raises:
        NotAnswered: It is something else.
    """
    texts = given(body, name, LIST)
    if not all(isinstance(text, str) for text in texts):
        raise NotAnswered(400, "invalid_value", f"{name} is {texts!r:.80}: send a list of texts")
    return tuple(texts)


def role_of(message: Json, *roles: str) -> str:
    """Return the role of a message; what OpenAI's APIs call a developer is the system.

    Raises:
        NotAnswered: The API has no such role. A template may leave out messages of unknown roles.
    """
    role = message["role"]
    if role not in roles:
        known = ", ".join(roles)
        raise NotAnswered(400, "invalid_value", f"a message has the role {role!r:.80}: send one of {known}")
    return "system" if role == "developer" else role


def content_of(content: object) -> str | list[ContentPart]:
    """Return content as text if it is nothing but text, else as parts in OpenAI's chat format.

    Raises:
        NotAnswered: A part is neither text nor an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_part(part) for part in _listed(content)]
    # One text, because many templates print a list of parts as it is, or refuse it.
    if all(part.get("type") == "text" for part in parts):
        return "".join(part.get("text", "") for part in parts)
    return parts


def _part(part: Json | str) -> ContentPart:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type")
    if kind == "image_url":
        return {"type": "image_url", "image_url": part["image_url"]}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    if kind == "image":
        source = part["source"]
        url = source.get("url") or f"data:{source['media_type']};base64,{source['data']}"
        return {"type": "image_url", "image_url": {"url": url}}
    # A refusal is what the model said, so it is text of the conversation as any other.
    text = part.get("text", part.get("refusal"))
    if not isinstance(text, str):
        raise NotAnswered(400, "unsupported_content", f"content of the type {kind!r} cannot be rendered")
    return {"type": "text", "text": text}


def words(content: object) -> str:
    """Return the text of content without its other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(
        part if isinstance(part, str) else part.get("text") or part.get("refusal") or ""
        for part in _listed(content)
    )


def _listed(content: object) -> Sequence[Json | str]:
    if not isinstance(content, list):
        raise NotAnswered(400, "invalid_value", f"content is {content!r:.80}: send a text or a list of parts")
    return cast("Sequence[Json | str]", content)


def schema_of(name: str, description: object, parameters: object) -> Mapping[str, JsonValue]:
    """Return the schema of a tool in OpenAI's chat format."""
    if not isinstance(parameters, dict | None):
        told = f"the parameters of {name!r} are {parameters!r:.80}: send a JSON schema"
        raise NotAnswered(400, "invalid_value", told)
    own = cast("JsonValue", parameters or {"type": "object", "properties": {}})
    return {
        "type": "function",
        "function": {"name": name, "description": str(description or ""), "parameters": own},
    }


def arguments_of(call: Json) -> str:
    """Return the arguments of a call as JSON; some clients send them as an object."""
    arguments = call.get("arguments") or ""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def seed_of(body: Json) -> int | None:
    """Return the seed of a request; None if it has none.

    Raises:
        NotAnswered: It is no whole number.
    """
    seed = body.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise NotAnswered(400, "invalid_value", f"seed is {seed!r:.80}: send a whole number")
    return seed


def tokens_of(body: Json, *names: str) -> int | None:
    """Return the token limit in the first of these fields that is set; None if none is.

    Raises:
        NotAnswered: It is no number of at least 1.
    """
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        # `True` is an int in Python, and would be a limit of one token.
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise NotAnswered(400, "invalid_value", f"{name} is {value!r:.80}: send a whole number from 1")
        return value
    return None
