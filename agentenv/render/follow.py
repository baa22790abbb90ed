"""Read a completion while it is sampled: the thinking and the text that no further token can change.

What is settled is always the beginning of what `Renderer.parse` returns for the whole completion:

1. In doubt nothing is settled. Text that may be the beginning of a tag, of a stop string or of a character
   waits, and white space at the end waits, because the parser may remove it.
2. Where a call may begin, or any control token stands but those around the thinking, settling ends. Grammars
   that read the turn as a whole, and tokenizers whose tokens change the text of earlier ones, settle nothing.
   The rest is known when the completion is whole.
3. Only new tokens are decoded, and only text that has not settled is searched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum

from tokenizers.decoders import DecodeStream

from agentenv.render.parse.library import GRAMMARS
from agentenv.render.parse.turn import THINK_TAGS, TurnReader
from agentenv.render.tokenizer import ChatTokenizer

__all__ = ["TurnFollower"]

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A token of a single byte, which SentencePiece writes where it knows no piece."""
_TAGS = tuple(tag for pair in THINK_TAGS for tag in pair)
_BARE_CALLS = ("{", "[", "functools")
"""How a turn begins that consists of calls without tags."""
_BARE_LATER = ("{", "[", "<", "```", "functools")
"""How calls without tags begin after text, also behind tags of other families."""
_MAX_WAITING = 8
"""Tokens that may wait for the rest of a character; more are no character at all."""


class _Part(Enum):
    START = 1
    THINKING = 2
    CONTENT = 3
    OVER = 4
    """The text that can be passed on has ended."""


class TurnFollower:
    """The settled part of one completion.

    Args:
        reader: parses the completion when it is whole.
        tokenizer: decodes tokens that are no control tokens.
        names: the control strings by id.
        stop: texts at which the content will be cut off.
    """

    def __init__(
        self,
        reader: TurnReader,
        tokenizer: ChatTokenizer,
        names: Mapping[int, str],
        stop: Sequence[str] = (),
    ) -> None:
        self.thinking = ""
        """The settled thinking, which only grows."""
        self.content = ""
        """The settled text, which only grows."""
        self._reader = reader
        self._names = names
        self._stop = tuple(stop)
        self._backend = tokenizer.backend
        self._decoding = DecodeStream(skip_special_tokens=False)
        self._waiting = 0
        """Number of tokens whose text waits for the rest of a character."""
        self._text = ""
        """Text of the present part."""
        self._searched = 0
        """Characters of `_text` in which no tag begins."""
        self._has_thinking = False
        self._is_text = False
        """True once it is certain that the content begins with the text that is there."""
        grammar = reader.grammar
        bare = grammar.bare is None or GRAMMARS.get(grammar.name) is grammar
        self._openers = dict(reader.forms.tags)
        # Thinking without an opening tag is known for what it is only when it is closed.
        readable = tokenizer.decodes_in_parts and grammar.whole is None and bare and "" not in self._openers
        self._part = _Part.START if readable else _Part.OVER
        openers = [block.opens for block in grammar.blocks]
        self._call_tags = tuple(tag for tag in (*openers, *grammar.wrappers) if tag not in reader.control)
        self._tags = (*self._call_tags, *(() if grammar.bare is None else _BARE_LATER))
        self._plain_openers = tuple(tag for tag in self._openers if tag not in reader.control)
        self._leads = {_first_of(lead) for lead in reader.forms.leads}
        self._closes = ""
        if readable and reader.forms.thinking_open:
            self._think(reader.forms.closes)

    def add(self, token_ids: Sequence[int]) -> None:
        """Read the next tokens of the completion."""
        for token_id in token_ids:
            if self._part is _Part.OVER:
                return
            string = self._names.get(token_id)
            if token_id in self._reader.end_ids or string is not None:
                self._control(string)
            elif self._decode(token_id):
                self._settle()

    def _decode(self, token_id: int) -> bool:
        """Decode a token, and return whether the text up to it is certain."""
        try:
            text = self._decoding.step(self._backend, token_id)
        except Exception:  # noqa: BLE001 - tokenizers has no class for a character that changed afterwards
            self._part = _Part.OVER
            return False
        if text:
            self._text += text
            self._waiting = 0
            # Bytes that no character follows may make those before them, which read as characters, wrong.
            return _BYTE.fullmatch(self._backend.id_to_token(token_id) or "") is None
        self._waiting += 1
        if self._waiting > _MAX_WAITING:
            self._part = _Part.OVER
        return False

    def _control(self, string: str | None) -> None:
        """Read a control token: one of those around the thinking, or the end of what can be settled."""
        opens = self._part is _Part.START and string in self._openers and not self._text.strip()
        closes = self._part is _Part.THINKING and string == self._closes
        if self._waiting or string is None or not (opens or closes):
            self._part = _Part.OVER
            return
        self._decoding = DecodeStream(skip_special_tokens=False)
        if opens:
            self._text = ""
            self._think(self._openers[string])
        else:
            self._thought(self._text)
            self._answer("")

    def _settle(self) -> None:
        if self._part is _Part.START:
            self._begin()
        if self._part is _Part.THINKING:
            self._settle_thinking()
        if self._part is _Part.CONTENT:
            self._settle_content()

    # Thinking -----------------------------------------------------------------------------

    def _begin(self) -> None:
        """Find out whether the completion begins with thinking, once enough of it is there."""
        text = self._text.lstrip()
        opens = next((tag for tag in self._plain_openers if text.startswith(tag)), None)
        if opens is not None:
            self._text = text[len(opens) :]
            self._think(self._openers[opens])
        elif text and not any(tag.startswith(text) for tag in self._plain_openers):
            self._part = _Part.CONTENT

    def _think(self, closes: str) -> None:
        self._part, self._closes, self._has_thinking = _Part.THINKING, closes, True
        self._searched = 0

    def _settle_thinking(self) -> None:
        text = self._text
        end = -1 if self._closes in self._reader.control else text.find(self._closes, self._searched)
        if end >= 0:
            self._thought(text[:end])
            self._answer(text[end + len(self._closes) :])
            return
        # The parser removes tags from both ends of the thinking, and calls at the end of thinking that is not
        # closed, so what follows any tag waits.
        tags = (*_TAGS, *self._call_tags)
        found = _first_tag(text, tags, self._searched)
        if not text.startswith(tags, found):
            self._searched = found
        self._grow_thinking(text[:found].strip("\n"))

    def _thought(self, text: str) -> None:
        """Settle the whole thinking, unless the parser removes more than the tags around it."""
        if text.startswith(_TAGS) or text.endswith(_TAGS):
            self._part = _Part.OVER
        else:
            self._grow_thinking(text.strip("\n"))

    def _grow_thinking(self, text: str) -> None:
        if len(text) > len(self.thinking):
            self.thinking = text

    # Text ---------------------------------------------------------------------------------

    def _answer(self, text: str) -> None:
        """Read the text after the thinking."""
        if self._part is not _Part.OVER:
            self._part, self._text, self._searched = _Part.CONTENT, text, 0
            self._settle_content()

    def _settle_content(self) -> None:
        self._is_text = self._is_text or self._begins_as_text()
        if not self._is_text:
            return
        text = self._text
        found = _first_tag(text, self._tags, self._searched)
        settled = text[:found].strip() if self._has_thinking else text[:found].rstrip()
        # No stop string begins in what settled before.
        settled = settled[: _first_tag(settled, self._stop, len(self.content))]
        if len(settled) > len(self.content):
            self.content = settled
        if text.startswith(self._tags, found):
            self._part = _Part.OVER
        else:
            self._searched = found

    def _begins_as_text(self) -> bool:
        """Return whether the parser is sure to keep the beginning of the text as it is."""
        text = self._text.lstrip() if self._has_thinking else self._text
        if not text:
            return False
        if not self._has_thinking and (text[0].isspace() or not self._leads.isdisjoint((text[0], ""))):
            return False
        may_be_call = any(call.startswith(text) or text.startswith(call) for call in _BARE_CALLS)
        return self._reader.grammar.bare is None or not may_be_call


def _first_tag(text: str, tags: Sequence[str], start: int) -> int:
    """Return where the first tag begins, or where the end of the text may begin one; else the length."""
    whole = min((at for tag in tags if (at := text.find(tag, start)) >= 0), default=len(text))
    longest = max(map(len, tags), default=1)
    for at in range(max(start, len(text) - longest + 1), whole):
        rest = text[at:]
        if any(tag.startswith(rest) for tag in tags):
            return at
    return whole


def _first_of(lead: str) -> str:
    """Return the character with which the pattern of a header begins; empty if it is not certain."""
    if lead.startswith("\\"):
        return "" if lead[1:2].isalnum() else lead[1:2]
    return "" if lead[:1] in "[(." else lead[:1]
