"""Encode rendered text piece by piece, so that each piece gets the ids it would have inside a longer text."""

from __future__ import annotations

from collections.abc import Sequence

from agentenv.core.errors import RenderError
from agentenv.render.control import ControlSet
from agentenv.render.tokenizer import ChatTokenizer

__all__ = ["PieceEncoder"]

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
        self._prefixes = bool(self._anchor) and self._decoded_after_anchor("a") != "a"

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

    def _decoded_after_anchor(self, text: str) -> str:
        return self._tokenizer.decode(self._after("", text))
