"""The parts of a tool-call grammar: which tags enclose calls, and which functions read them."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from agentenv.core.messages import CallStatus, check_text
from agentenv.render.parse.schema import NO_SCHEMA, Alternatives
from agentenv.render.parse.values import LiteralReader, Unquoted

if TYPE_CHECKING:
    from agentenv.render.control import ControlSet
    from agentenv.render.tokenizer import ChatTokenizer

__all__ = [
    "BareReader",
    "Block",
    "Grammar",
    "Nested",
    "RawCall",
    "Reader",
    "Span",
    "ToolIndex",
    "TurnText",
    "WholeTurn",
    "as_arguments",
    "held",
    "repeated",
    "stray_text",
]


class TurnText:
    """Decoded text with the positions of its control tokens.

    A tag that is a control token of the vocabulary is found only where that token was sampled. Any
    other tag is found in the text.

    Args:
        text: the decoded completion.
        places: start positions of each control token in ascending order, by its string.
        control: the control strings of the vocabulary.
        token_ids: the decoded token ids; empty if the text has none.
    """

    __slots__ = ("_control", "_covered", "_memo", "_places", "inside", "text", "token_ids")

    def __init__(
        self,
        text: str,
        places: Mapping[str, Sequence[int]],
        control: ControlSet,
        token_ids: Sequence[int] = (),
    ) -> None:
        self.text = text
        self.token_ids = token_ids
        self._places = places
        self._control = control.strings
        self.inside = control.inside
        """Function that returns `(offset, string)` for each control string inside a tag."""
        self._covered = sorted(
            (start, start + len(tag)) for tag, starts in places.items() for start in starts
        )
        self._memo: dict[str, tuple[int, int]] = {}

    @classmethod
    def decode(
        cls,
        token_ids: Sequence[int],
        tokenizer: ChatTokenizer,
        control: ControlSet,
        names: Mapping[int, str],
    ) -> TurnText:
        """Decode a completion; runs of ordinary tokens are decoded together.

        Args:
            token_ids: the completion.
            tokenizer: decodes the ordinary tokens.
            control: the control strings of the vocabulary.
            names: the control strings by id.
        """
        pieces: list[str] = []
        places: dict[str, list[int]] = {}
        length = start = 0
        for index, token_id in enumerate(token_ids):
            string = names.get(token_id)
            if string is None:
                continue
            if start < index:
                pieces.append(tokenizer.decode(token_ids[start:index]))
                length += len(pieces[-1])
            places.setdefault(string, []).append(length)
            pieces.append(string)
            length += len(string)
            start = index + 1
        if start < len(token_ids):
            pieces.append(tokenizer.decode(token_ids[start:]))
        return cls("".join(pieces), places, control, token_ids)

    def find(self, tag: str, start: int = 0) -> int:
        """Return the first position of the tag at or after `start`, or -1."""
        # A cached result holds for every start between that of its search and the position it found.
        searched_from, position = self._memo.get(tag, (len(self.text) + 1, -1))
        if searched_from <= start and (position == -1 or position >= start):
            return position
        position = self._search(tag, start)
        self._memo[tag] = (start, position)
        return position

    def sampled(self, start: int, end: int, but: str = "") -> str:
        """Return the first control token that was sampled between two positions, or ""; `but` is none."""
        index = bisect_left(self._covered, (start, 0))
        while index < len(self._covered) and self._covered[index][1] <= end:
            if (string := self.text[slice(*self._covered[index])]) != but:
                return string
            index += 1
        return ""

    def begins_with_control(self, tag: str) -> bool:
        """Return whether the first characters of a tag are a control token."""
        return any(offset == 0 for offset, _ in self.inside(tag))

    def at(self, tag: str, position: int) -> bool:
        """Return True if the tag is exactly at this position."""
        if tag in self._control:
            starts = self._places.get(tag, ())
            index = bisect_left(starts, position)
            return index < len(starts) and starts[index] == position
        return self.text.startswith(tag, position) and self._real(tag, position)

    def _search(self, tag: str, start: int) -> int:
        if tag in self._control:
            starts = self._places.get(tag, ())
            index = bisect_left(starts, start)
            return starts[index] if index < len(starts) else -1
        position = self.text.find(tag, start)
        while position >= 0 and not self._real(tag, position):
            position = self.text.find(tag, position + 1)
        return position

    def _real(self, tag: str, start: int) -> bool:
        """Return True if no control token overlaps an edge of the tag and those inside it were sampled."""
        for edge in (start, start + len(tag)):
            index = bisect_left(self._covered, (edge, 0))
            if index > 0 and self._covered[index - 1][1] > edge:
                return False
        return all(self.at(string, start + offset) for offset, string in self.inside(tag))


_Value = TypeVar("_Value")

Nested: TypeAlias = "str | tuple[tuple[str, Nested], ...]"
"""Text, or a tuple of tags with their contents; the tuple is empty if there is neither."""


@dataclass(frozen=True, slots=True)
class RawCall:
    """A call as its grammar reads it, before it is checked against the tools."""

    name: str = ""
    arguments: str = "{}"
    """JSON text of the arguments; a grammar without types leaves it out and sets `untyped`."""
    parsed: Mapping[str, Any] | None = None
    """The decoded `arguments`; None if they were not decoded or cannot be passed to a tool."""
    untyped: Mapping[str, Any] | None = None
    """Arguments whose texts (`Nested`) are converted to the types in the schema of the tool."""
    is_text: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """Kinds that the call itself states: text (True) or JSON (False)."""
    id: str = ""
    status: CallStatus = CallStatus.OK
    error: str = ""
    text: str | None = None
    """The call as it was written; None if the grammar does not say, empty if the content has it already."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the completion: `text[start:end]`."""

    start: int
    end: int


Reader: TypeAlias = Callable[[TurnText, Span], Sequence[RawCall]]
"""Function that reads the inside of one block; it never raises but returns malformed calls with a status."""


BareReader: TypeAlias = "Callable[[str], tuple[Sequence[RawCall], int] | None]"
"""Function that returns the calls with which a text begins, and where they end; None without any."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the text that contains calls, from an opening tag to a closing tag."""

    opens: str
    closes: str
    """The closing tag; if empty, the block ends at the next opening tag or at the end of the turn."""
    read: Reader
    last: str = ""
    """What stands before the closing tag, which is a part of a value elsewhere; empty if anything may."""


@dataclass(frozen=True, slots=True)
class WholeTurn:
    """A whole turn as read by a grammar that covers content and thinking as well as calls."""

    content: str
    thinking: str
    calls: tuple[RawCall, ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A format in which models write tool calls."""

    name: str
    blocks: tuple[Block, ...] = ()
    bare: BareReader | None = None
    """Function that reads calls without tags at the beginning of a text."""
    whole: Callable[..., WholeTurn] | None = None
    """Function that reads thinking and content too; it is called with the turn and `ended=`."""
    wrappers: tuple[str, ...] = ()
    """Tags around blocks and bare calls, which are removed from the content."""
    inner: tuple[str, ...] = ()
    """Other tags of calls, which must not stand outside of calls."""
    spell: Callable[[Sequence[Mapping[str, Any]]], str] | None = None
    """Function that writes calls, each a name and arguments, for templates that leave them out."""
    untyped: bool = False
    """Whether values are written as text, so that the schema of the tool decides their types."""

    @property
    def syntax(self) -> tuple[str, ...]:
        """Every tag of this format that is markup and not plain text such as a bracket."""
        blocks = (tag for block in self.blocks for tag in (block.opens, block.closes))
        tags = dict.fromkeys((*blocks, *self.wrappers, *self.inner))
        return tuple(tag for tag in tags if len(tag) > 2 and tag[0] in "<[]")


@dataclass(frozen=True, slots=True)
class ToolIndex:
    """The tools of an episode, indexed for the parser."""

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Schema of the parameters, by name of the tool."""

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, object]]) -> ToolIndex:
        """Index tool schemas in OpenAI's shape."""
        functions = [cast("Mapping[str, Any]", tool.get("function") or tool) for tool in tools]
        schemas = {str(entry["name"]): entry.get("parameters") or {} for entry in functions}
        return cls(schemas)

    def typed(
        self, name: str, values: Mapping[str, Any], is_text: Mapping[str, bool]
    ) -> tuple[str, dict[str, Any] | None]:
        """Convert untyped arguments to the types that the call or the schema of the tool states.

        Returns:
            The JSON text of the arguments, and their values, or None if they cannot be passed to a tool.
        """
        schema = Alternatives.of(self.schemas.get(name, {}), values)
        if len(values) == 1 and not values.keys() <= schema.names:
            inner = _typed(next(iter(values.values())), NO_SCHEMA)
            if isinstance(inner, dict) and inner and inner.keys() <= schema.names:  # pyright: ignore[reportUnknownMemberType]
                values, is_text = cast("dict[str, Any]", inner), {}  # all arguments stand in one parameter
        typed = {
            key: _stated(value, is_text[key], schema.property(key))
            if key in is_text
            else _typed(value, schema.property(key))
            for key, value in values.items()
        }
        return as_arguments(typed)


def as_arguments(values: _Value) -> tuple[str, _Value | None]:
    """Return values as JSON text, and the values, or None if they cannot be passed to a tool, such as NaN."""
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        check_text(text, values)
    except ValueError:
        return json.dumps(values, ensure_ascii=False), None
    return text, values


def _stated(text: Nested, is_text: bool, schema: Alternatives) -> object:
    """Return a value of which the call says whether it is text, unless its schema allows only the other."""
    types = schema.types
    if types and ("string" not in types if is_text else types == {"string"}):
        return _typed(text, schema)
    return text if is_text else _typed(text, NO_SCHEMA)


_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def _typed(text: Any, schema: Alternatives) -> object:
    """Return a value of which only the text is known; a schema without types allows what it looks like."""
    if isinstance(text, tuple):
        return _structure(cast("tuple[tuple[str, Nested], ...]", text), schema)
    if not isinstance(text, str):
        return _members(text, schema)
    types = schema.types
    if types == {"string"} or text in schema.values:
        return text
    try:
        value: object = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        value = _python_value(text, numbers=bool(types) and "string" not in types)
    return text if "string" in types and not schema.takes(value) else value


def _members(value: object, schema: Alternatives) -> object:
    """Return a value in which scalars without quotes have the types of its schema."""
    if isinstance(value, Unquoted):
        return _typed(str(value), schema)
    if isinstance(value, list):
        items = cast("list[object]", value)
        return [_members(item, schema.item(index)) for index, item in enumerate(items)]
    if isinstance(value, dict):
        members = cast("dict[str, object]", value)
        return {key: _members(item, schema.property(key)) for key, item in members.items()}
    return value


def _python_value(text: str, *, numbers: bool) -> object:
    """Return the list, object or constant that was written in Python's spelling, else the text itself.

    Where it must be a number, it may have zeros in front.
    """
    stripped = text.strip()
    if not numbers and not stripped.startswith(("{", "[")):
        return _PYTHON_WORDS.get(stripped, text)
    try:
        value, end = LiteralReader(stripped).value(0)
    except (ValueError, RecursionError):
        return text
    return value if end == len(stripped) else text


def _structure(tags: tuple[tuple[str, Nested], ...], schema: Alternatives) -> object:
    """Return tags as a list or an object, as the schema says; where it does not, `item` tags form a list.

    A tag that stands several times in an object is a list there.
    """
    types = schema.types
    kinds = types & {"array", "object"}
    row = "array" in kinds if len(kinds) == 1 else all(tag == "item" for tag, _ in tags)
    if not tags and (not kinds or "string" in types):
        return ""
    if row:
        return _row([inside for _, inside in tags], schema)
    members: dict[str, list[Nested]] = {}
    for tag, inside in tags:
        members.setdefault(tag, []).append(inside)
    return {
        tag: _typed(inside[0], schema.property(tag))
        if len(inside) == 1
        else _row(inside, schema.property(tag))
        for tag, inside in members.items()
    }


def _row(items: Sequence[Nested], schema: Alternatives) -> list[object]:
    return [_typed(inside, schema.item(index)) for index, inside in enumerate(items)]


def _refuse_constant(name: str) -> object:
    raise ValueError(name)


def repeated(name: str, key: str) -> RawCall:
    """Return a call with a parameter that is written twice, so it is not known which value was meant."""
    error = f"the parameter {key!r:.80} of {name} appears twice; write it once"
    return RawCall(name, status=CallStatus.BAD_ARGUMENTS, error=error)


def held(name: str, tag: str) -> RawCall:
    """Return a call with a control token where none belongs, so it is not known what was meant."""
    error = f"the call{' of ' * bool(name)}{name} has {tag} inside, so it was not run"
    return RawCall(name, status=CallStatus.BAD_ARGUMENTS, error=error)


def stray_text(name: str, text: str) -> RawCall:
    """Return a call with text between its parameters, which may be the rest of a value."""
    error = f"the call of {name} has {text.strip()[:80]!r} outside of its parameters, so it was not run"
    return RawCall(name, status=CallStatus.BAD_ARGUMENTS, error=error)
