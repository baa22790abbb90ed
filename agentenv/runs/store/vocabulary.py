"""The text of token ids, stored with a run so that the run can be viewed without its tokenizer.

A token may contain only a part of a character. Its text is therefore stored as bytes, with one character
(U+0000 to U+00FF) for each byte, and a reader joins the bytes of neighbouring tokens before decoding them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

__all__ = ["TokenTexts", "token_bytes"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Looks up the bytes of each token id once, as characters below U+0100.

    Args:
        backend: a `tokenizers.Tokenizer`.
        known: ids whose text is already stored.
    """

    def __init__(self, backend: Any, known: Iterable[int] = ()) -> None:
        self._backend = backend
        self._seen = set(known)
        self._byte_level = "ByteLevel" in repr(backend.decoder)
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: str(token.content) for token_id, token in added.items()}

    def fresh(self, spans: Iterable[Iterable[int]]) -> dict[int, str]:
        """Return the text of the ids that were not looked up before, without ids that the tokenizer lacks."""
        new = set[int]().union(*[ids for ids in spans if not self._seen.issuperset(ids)]) - self._seen
        self._seen |= new
        texts: dict[int, str] = {}
        for token_id in sorted(new):
            piece = self._added.get(token_id)
            if piece is not None:
                texts[token_id] = piece.encode().decode("latin-1")
            elif (piece := self._backend.id_to_token(token_id)) is not None:
                data = token_bytes(piece, byte_level=self._byte_level)
                texts[token_id] = data.decode("latin-1")
        return texts


def token_bytes(piece: str, *, byte_level: bool) -> bytes:
    """Return the bytes that a vocabulary entry stands for.

    Byte-level vocabularies such as GPT-2's write each byte as one printable character. SentencePiece
    vocabularies write a space as U+2581 and single bytes as `<0x0A>`.
    """
    if byte_level:
        table = _byte_of_character()
        if all(character in table for character in piece):
            return bytes(table[character] for character in piece)
        return piece.encode(errors="replace")
    single = _BYTE_TOKEN.fullmatch(piece)
    if single:
        return bytes([int(single[1], 16)])
    return piece.replace("▁", " ").encode(errors="replace")


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's table: printable Latin-1 bytes stand for themselves, the others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }
