"""Read the tokenizer of a GGUF file from its header, without gguf and transformers.

Only byte-level BPE tokenizers with a known splitting rule are read; for all others `read_gguf` returns None.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = ["GgufTokenizer", "read_gguf"]

GgufTokenizer: TypeAlias = tuple[Tokenizer, "str | None", dict[str, str]]
"""The tokenizer, the chat template, and the special tokens by the names that templates use."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY, _CONTROL = 8, 9, 3
_DIGITS_APART = {"smollm"}
_KNOWN = {*_DIGITS_APART, "gpt-2"}


def read_gguf(file: Path) -> GgufTokenizer | None:
    """Return the tokenizer of a GGUF file, or None if this module cannot read its kind."""
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            return None
        _, _, count = struct.unpack("<IQQ", stream.read(20))
        values = dict(_pair(stream) for _ in range(count))
    if values.get("tokenizer.ggml.model") != "gpt2" or values.get("tokenizer.ggml.pre") not in _KNOWN:
        return None
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in values["tokenizer.ggml.merges"]]
    backend = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)  # pyright: ignore[reportArgumentType]
    )
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if values["tokenizer.ggml.pre"] in _DIGITS_APART:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    kinds = values.get("tokenizer.ggml.token_type") or []
    special = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    named = {
        name: tokens[values[f"tokenizer.ggml.{key}_token_id"]]
        for key, name in names.items()
        if f"tokenizer.ggml.{key}_token_id" in values
    }
    return backend, values.get("tokenizer.chat_template"), named


def _pair(stream: BinaryIO) -> tuple[str, Any]:
    key = _text(stream)
    (kind,) = struct.unpack("<I", stream.read(4))
    return key, _value(stream, kind)


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == _TEXT:
        return _text(stream)
    if kind == _ARRAY:
        item, count = struct.unpack("<IQ", stream.read(12))
        if item in _NUMBERS:
            code = f"<{count}{_NUMBERS[item]}"
            return list(struct.unpack(code, stream.read(struct.calcsize(code))))
        return [_value(stream, item) for _ in range(count)]
    code = "<" + _NUMBERS[kind]
    return struct.unpack(code, stream.read(struct.calcsize(code)))[0]


def _text(stream: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", stream.read(8))
    return stream.read(length).decode("utf-8", "replace")
