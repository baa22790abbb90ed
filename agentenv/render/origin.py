"""Find the control strings that a template put together with untrusted text, and split them.

Marks keep a control string from standing whole inside untrusted texts. They can't see what the template
writes beside a text: `'<' ~ key ~ '>'` makes `<|im_end|>` of the key `|im_end|`, and `| upper` makes
`[INST]` of `[inst]`. Therefore a render is compared with a second one, in which marks stand between all
characters of every text that could be part of a control string. The control strings of the second render
come from the template alone. One that is only in the first render is split behind its first character.

Most renders are not drawn twice: which control strings follow a turn is remembered by the roles of the
new messages, and only a render with other control strings than those is compared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal, TypeAlias, cast

from agentenv.core.errors import RenderError
from agentenv.render.control import SENTINEL, WORDS, ControlSet, Marker, Neutraliser
from agentenv.render.tail import Cut
from agentenv.render.template import ChatTemplate
from agentenv.render.tokenizer import ChatTokenizer

__all__ = ["OriginCheck", "PieceEncoder"]

_GUARDS = ("\n", "0", "é", "a", "\u4e00", "=", "\t")


class PieceEncoder:
    """Encodes text that follows a control token or other text.

    Each piece is encoded after a control token, the anchor, whose id is then dropped. The piece
    therefore gets no prefix space and no start-of-text treatment that it would not get in the whole text.
    """

    __slots__ = ("_anchor", "_anchor_id", "_prefixes", "_tokenizer")

    def __init__(self, tokenizer: ChatTokenizer, control: ControlSet) -> None:
        self._tokenizer = tokenizer
        self._anchor, self._anchor_id = "", -1
        added = tokenizer.added_tokens
        for string, token_id in control.strings.items():
            token = added[token_id]
            if token.special and not (token.rstrip or token.single_word or token.normalized):
                self._anchor, self._anchor_id = string, token_id
                break
        else:
            for string, token_id in control.strings.items():
                if tokenizer.encode(string + "a")[:1] == [token_id] and not added[token_id].rstrip:
                    self._anchor, self._anchor_id = string, token_id
                    break
        self._prefixes = bool(self._anchor) and self._tokenizer.decode(self._after("", "a")) != "a"

    def start(self, pieces: Sequence[str]) -> list[int]:
        """Encode a text from its beginning; each later piece continues the one before it."""
        ids = self._tokenizer.encode(pieces[0])
        for piece in pieces[1:]:
            ids += self._continue(piece)
        return ids

    def after(self, anchor: str, pieces: Sequence[str]) -> list[int]:
        """Encode text that follows the control token `anchor` (any control token if it is empty)."""
        ids = self._after(anchor, pieces[0])
        for piece in pieces[1:]:
            ids += self._continue(piece)
        return ids

    def _after(self, anchor: str, piece: str) -> list[int]:
        if not piece:
            return []
        anchor = anchor or self._anchor
        if not anchor:
            return self._tokenizer.encode(piece)
        return self._tokenizer.encode(anchor + piece)[1:]

    def _continue(self, piece: str) -> list[int]:
        """Encode a piece that follows other text, without the space that some tokenizers add in front."""
        if not piece or not self._prefixes:
            return self._after("", piece)
        for guard in _GUARDS:
            before = self._after("", guard)
            ids = self._after("", guard + piece)
            if ids[: len(before)] == before and len(ids) > len(before):
                return ids[len(before) :]
        raise RenderError(
            f"the tokenizer merges {piece[:20]!r} with any text before it, so it cannot be encoded alone"
        )


_MAX_SHAPES = 1024
_MAX_VARIANTS = 4

_VALUES = {
    "role": frozenset(["system", "developer", "user", "assistant", "tool"]),
    "type": frozenset(
        ["function", "string", "integer", "number", "boolean", "object", "array", "null", "text"]
    ),
}
"""Values that templates compare; they must not change."""
_NAMED_BY_USERS = frozenset({"properties", "patternProperties", "$defs", "definitions"})

_Keys: TypeAlias = Literal["words", "names", "any"]
"""What the keys of a JSON object are: words of a schema, names of the schemas below, or anything."""


class OriginCheck:
    """Keeps the renders of one template free of control strings that untrusted text took part in."""

    def __init__(self, control: ControlSet, tokenizer: ChatTokenizer, template: ChatTemplate | None) -> None:
        self._control = control
        self._tokenizer = tokenizer
        self._template = template
        self._known: dict[Hashable, list[list[str]]] = {}

    def pieces(
        self, draw: Callable[[Marker], Cut], texts: Sequence[str], shape: Hashable | None
    ) -> tuple[str, list[str]]:
        """Return the control string before a rendered text, and the text in pieces that are safe to encode.

        Args:
            draw: renders with a marker, and gives the marker every untrusted string.
            texts: all untrusted strings of the render.
            shape: renders of equal shape write equal control strings; None if that is not known.

        Raises:
            RenderError: The template writes other control strings because of what an untrusted text says.
        """
        neutral = Neutraliser(self._control, self._tokenizer, texts)
        cut = draw(neutral)
        found = self._find(cut.text)
        pieces = neutral.split(cut.text)
        if shape is not None and found in self._known.get(shape, ()):
            return cut.after, pieces
        compared = self._compared(cut, pieces, draw, _Spread(self._control, texts, self._kept))
        if shape is not None and compared == pieces:
            self._remember(shape, found)
        return cut.after, compared

    def _remember(self, shape: Hashable, found: list[str]) -> None:
        if len(self._known) >= _MAX_SHAPES:
            self._known.clear()
        self._known[shape] = [found, *self._known.get(shape, ())][:_MAX_VARIANTS]

    def _compared(
        self, cut: Cut, pieces: list[str], draw: Callable[[Marker], Cut], spread: _Spread
    ) -> list[str]:
        """Compare with a second render, and return the pieces with the control strings of texts split."""
        try:
            other = draw(spread)
        except RenderError as error:
            raise RenderError(
                f"the template refuses these messages where control strings in them are taken apart: {error}",
                remedy="remove control strings from names, keys and roles",
            ) from error
        others = spread.split(other.text)
        if "".join(pieces) == "".join(others) and cut.after == other.after:
            return self._split(pieces, self._starts(others))
        found, expected = Counter(self._find(cut.text)), Counter(self._find(other.text))
        if found != expected:
            changed = " ".join(found - expected or expected - found)
            raise RenderError(
                f"a text in the messages or tools changes how often the template writes {changed}, and it "
                "can't be told whether the text itself would become a control token",
                remedy="remove that text, or pass a chat_template that does not depend on it",
            )
        return pieces

    def _find(self, text: str) -> list[str]:
        normalizer = self._tokenizer.backend.normalizer if self._control.needs_normalized_check else None
        if normalizer is not None and not text.isascii():
            text = normalizer.normalize_str(text)
        return self._control.find(text)

    def _starts(self, pieces: Iterable[str]) -> dict[int, str]:
        """Return the control strings of pieces by their positions in the joined text."""
        starts: dict[int, str] = {}
        offset = 0
        for piece in pieces:
            for position, string in self._control.positions(piece):
                starts[offset + position] = string
            offset += len(piece)
        return starts

    def _split(self, pieces: Iterable[str], allowed: Mapping[int, str]) -> list[str]:
        """Split every control string that is not one of the allowed ones."""
        result: list[str] = []
        offset = 0
        for piece in pieces:
            cuts = [0]
            position = 0
            while (match := self._control.search(piece, position)) is not None:
                start, string = match
                own = allowed.get(offset + start, "")
                position = start + (len(own) or 1)
                if own != string:
                    cuts.append(position)
            result += [piece[a:b] for a, b in zip(cuts, [*cuts[1:], len(piece)], strict=True)]
            offset += len(piece)
        return [part for piece in result for part in self._normal(piece)]

    def _normal(self, piece: str) -> list[str]:
        """Split a piece into characters if the normaliser would make more control strings of it."""
        if self._find(piece) == self._control.find(piece):
            return [piece]
        parts: list[str] = []
        position = 0
        for start, string in self._control.positions(piece):
            parts += [*piece[position:start], string]
            position = start + len(string)
        return [*parts, *piece[position:]]

    @cached_property
    def _kept(self) -> re.Pattern[str] | None:
        """Strings that the template may look for, unless they could be part of a control string."""
        constants = self._template.constants() if self._template is not None else ()
        kept = [text for text in constants if len(text) > 1 and not self._control.overlaps(text)]
        kept.sort(key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, kept))})") if kept else None


class _Spread(Marker):
    """Puts marks between all characters of the texts that could be part of a control string."""

    __slots__ = ("_kept",)

    def __init__(self, control: ControlSet, texts: Iterable[str], kept: re.Pattern[str] | None) -> None:
        super().__init__(control, texts)
        self._kept = kept

    def text(self, text: str) -> str:
        """Return the text with marks between its characters; white space and kept strings have none.

        Templates strip white space, and look for kept strings.
        """
        text = self._control.clean(text)
        core = text.strip()
        if not core or not (self._control.may_be_part(core) or SENTINEL in core):
            return text
        parts = self._kept.split(text) if self._kept is not None else [text]
        spread = [
            part if i % 2 else re.sub(r"(?<=\S)(?=\S)", self.mark, part) for i, part in enumerate(parts)
        ]
        body = ""
        for part in spread:
            between = body and part and not body[-1].isspace() and not part[0].isspace()
            body += self.mark + part if between else part
        self.used = True
        if spread[0].strip() and self._control.is_last(core[0]):
            lead = len(body) - len(body.lstrip())
            body = body[:lead] + self.mark + body[lead:]
        if spread[-1].strip():
            end = len(body.rstrip())
            body = body[:end] + self.mark + body[end:]
        return body

    def message(self, message: Mapping[str, object]) -> dict[str, object]:
        """Return a message with its marks; its own keys have none."""
        return {key: self._item(key, item, "words") for key, item in message.items()}

    def value(self, value: object) -> object:
        """Return a JSON value with its marks; words that templates compare have none."""
        return self._walk(value, "words")

    def _walk(self, value: object, keys: _Keys) -> object:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, (list, tuple)):
            return [self._walk(item, keys) for item in cast("list[object]", value)]
        if not isinstance(value, (dict, Mapping)):
            return value
        entries = cast("Mapping[object, object]", value)
        return {self._key(key, keys): self._item(key, item, keys) for key, item in entries.items()}

    def _key(self, key: object, keys: _Keys) -> object:
        if not isinstance(key, str) or (keys == "words" and key in WORDS):
            return key
        return self.text(key)

    def _item(self, key: object, item: object, keys: _Keys) -> object:
        if keys == "any":
            return self._walk(item, "any")
        if keys == "names" or not isinstance(key, str):
            return self._walk(item, "words")
        if key in _VALUES and isinstance(item, (str, list)):
            values = [item] if isinstance(item, str) else cast("list[object]", item)
            if all(value in _VALUES[key] for value in values if isinstance(value, str)):
                return item
        below: _Keys = "any" if key == "arguments" else "names" if key in _NAMED_BY_USERS else "words"
        return self._walk(item, below)
