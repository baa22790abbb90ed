"""Turn the value that a tool returns into the content that the model reads.

Text stays as it is, images become content parts, and any other value becomes JSON. NaN and infinity are
written as strings, bytes as base64 with a note, and sets in a stable order, so that the JSON is always valid.
A value that has no JSON form is the author's mistake and raises an error.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from enum import Enum
from math import isfinite, isnan
from typing import Any, cast

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from agentenv.core.messages import ContentPart

__all__ = ["Image", "parts_of", "to_content"]

_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")
_PART_KEYS = {"text": str, "image_url": dict}


@dataclass(frozen=True, slots=True)
class Image:
    """An image that a tool returns; the model gets it as a content part."""

    data: bytes
    media_type: str = "image/png"

    def to_part(self) -> ContentPart:
        """Return the image as a content part with a data URL."""
        url = f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}


def to_content(value: object) -> str | list[ContentPart]:
    """Return a tool's result as the content of a tool message.

    Raises:
        TypeError: The value, or a part of it, cannot be written as JSON; the message names the type.
        ValueError: The value contains itself.
    """
    if isinstance(value, str) and not isinstance(value, Enum):
        return _whole(value)
    part = _image(value)
    if part is not None:
        return [part]
    return parts_of(value) or _whole(_json(value))


def parts_of(value: object) -> list[ContentPart]:
    """Return a list of content parts and images, with texts between them, as content parts.

    The parts may be those of OpenAI or of Hugging Face, `{"type": "image", "image": ...}`. Whatever else, a
    list of nothing but texts included, gives an empty list.
    """
    if not isinstance(value, list | tuple):
        return []
    entries = cast("list[object]", value)
    parts = [part for part in map(_part, entries) if part is not None]
    return parts if len(parts) == len(entries) and not all(isinstance(one, str) for one in entries) else []


def _json(value: object) -> str:
    try:
        return _ENCODER.encode(value)
    except ValueError as error:
        if "ircular" in str(error):
            raise ValueError(f"the tool returned a {type(value).__name__} that contains itself") from None
    except TypeError as error:
        if "keys must be" not in str(error):
            raise
    return json.dumps(_safe(value), ensure_ascii=False, default=_plain)


def _sort_key(entry: object) -> str:
    return json.dumps(entry, default=_plain, sort_keys=True)


def _plain(value: object) -> object:
    """Convert the outer level of a value to a JSON type; the encoder calls this again for what is inside."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return {"encoding": "base64", "num_bytes": len(data), "data": base64.b64encode(data).decode()}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, AbstractSet):
        return sorted(value, key=_sort_key)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime | date | time | timedelta):
        return to_jsonable_python(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        return cast("Any", value).tolist()
    text = str(value)
    if isinstance(value, Iterator) or callable(value) or _ADDRESS.search(text):
        raise TypeError(
            f"a {type(value).__name__} cannot be written as JSON; return text, a number, a list, a dict or a "
            "pydantic model"
        )
    return text


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_plain)


def _safe(value: object) -> object:
    """Copy a value so that its keys are strings, and floats that are not finite are strings too."""
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        if isfinite(value):
            return value
        return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {_key(key): _safe(entry) for key, entry in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_safe(entry) for entry in cast("list[object]", value)]
    return _safe(_plain(value))


def _key(key: object) -> str:
    if isinstance(key, str) and not isinstance(key, Enum):
        return key
    text = json.dumps(_safe(key), ensure_ascii=False, default=_plain)
    return text[1:-1] if text.startswith('"') else text


def _part(value: object) -> ContentPart | None:
    """Return an entry of a list as a content part; None if it is not text, an image or a content part."""
    if isinstance(value, str):
        return {"type": "text", "text": _whole(value)}
    image = _image(value)
    if image is not None:
        return image
    if isinstance(value, dict):
        entry = cast("dict[str, object]", value)
        kind = entry.get("type")
        if kind == "image" and set(entry) == {"type", "image"}:
            return _image(entry["image"])
        if (
            kind in _PART_KEYS
            and set(entry) == {"type", kind}
            and isinstance(entry[str(kind)], _PART_KEYS[str(kind)])
        ):
            return cast("ContentPart", entry)
    return None


def _image(value: object) -> ContentPart | None:
    if isinstance(value, Image):
        return value.to_part()
    pillow: Any = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        buffer = io.BytesIO()
        cast("Any", value).save(buffer, format="PNG")
        return Image(buffer.getvalue()).to_part()
    return None


def _whole(text: str) -> str:
    """Replace lone surrogates, which are not valid Unicode and which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
