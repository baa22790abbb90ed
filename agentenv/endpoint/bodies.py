"""Read the bodies of requests, each of which repeats the conversation of the one before.

Clients send the whole conversation every time, and write its beginning with the same bytes. Only the bytes
after the beginning of an earlier body are decoded and hashed. So the cost of a request depends on what is new
in it, but for a comparison of bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from agentenv.core.errors import UsageError
from agentenv.core.serving.body import parse_json, parse_json_beginning
from agentenv.endpoint.wire.common import Converted, Json

__all__ = ["Bodies", "Body"]

_LIST = re.compile(rb'"(messages|input)"[ \t\r\n]*:[ \t\r\n]*\[')
"""Where the list of messages begins; a quotation mark in a text has a backslash, so no text matches."""


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a request."""

    value: Json
    digest: bytes
    """Digest of its bytes."""
    converted: Converted
    """The messages of the conversation that were converted before."""


# Invariant: a parser that has read `begun` is in the list of messages, before a comma or the closing bracket,
# or before the first message if `messages` is empty. Whatever stands in other bodies after these bytes is
# therefore the rest of such a list and of its object.
@dataclass(slots=True, eq=False)
class _Read:
    """The beginning of a body, up to the end of its last message."""

    path: str
    name: str
    """Name of the list of messages."""
    begun: bytes
    head: bytes
    """The bytes before the list."""
    hashed: blake2b
    """The hash of the path and of `begun`."""
    messages: list[Any] = field(default_factory=list[Any])
    after: str = ""
    """The text after the list, when it was last read."""
    frame: Json = field(default_factory=dict[str, Any])
    """The body without its list."""
    converted: Converted = field(default_factory=Converted)


class Bodies:
    """The bodies that the clients of a session sent last."""

    KEPT = 8
    """Conversations that are kept; few agents lead more at once."""

    def __init__(self) -> None:
        self._reads: list[_Read] = []

    def read(self, path: str, content: bytes) -> Body:
        """Return the body of a request.

        Raises:
            UsageError: It is no JSON object.
        """
        known = [read for read in self._reads if read.path == path and content.startswith(read.begun)]
        read = max(known, key=lambda read: len(read.begun)) if known else _begun(path, content)
        if read is not None:
            body = self._go_on(read, content)
            if body is not None:
                return body
        value = parse_json(content)
        if not isinstance(value, dict):
            raise UsageError("the body is no JSON object")
        return Body(value, blake2b(path.encode() + content, digest_size=16).digest(), Converted())

    def _go_on(self, read: _Read, content: bytes) -> Body | None:
        """Read what follows an earlier beginning; None if the body must be read as a whole."""
        before = "[null" if read.messages else "["
        try:
            text = before + content[len(read.begun) :].decode()
            found, end = parse_json_beginning(text)
            after = text[end:]
            if after != read.after:
                frame: Any = parse_json(read.head + b"null" + after.encode())
                if not isinstance(frame, dict) or frame.get(read.name, "") is not None:
                    return None
                read.after, read.frame = after, frame
        except (UsageError, UnicodeDecodeError):
            return None
        read.messages = [*read.messages, *(found[1:] if read.messages else found)]
        end_of_list = len(content) - len(after.encode()) - 1
        read.hashed.update(content[len(read.begun) : end_of_list])
        read.begun = content[:end_of_list]
        whole = read.hashed.copy()
        whole.update(content[end_of_list:])
        others = [other for other in self._reads if other is not read]
        self._reads = [*others[1 - self.KEPT :], read]
        return Body({**read.frame, read.name: read.messages}, whole.digest(), read.converted)


def _begun(path: str, content: bytes) -> _Read | None:
    """Return the beginning of a body up to its list of messages; None if it has none."""
    found = _LIST.search(content)
    if found is None:
        return None
    begun = content[: found.end()]
    hashed = blake2b(path.encode() + begun, digest_size=16)
    return _Read(path, found.group(1).decode(), begun, begun[:-1], hashed)
