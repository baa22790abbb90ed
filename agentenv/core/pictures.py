"""Make the picture that everybody sees out of a file: the engine, the trainer, a vLLM server and the viewer.

Loaders disagree about files that say how to turn their pixels (EXIF) and about transparent ones. Most files
have neither, and stay as they are. Of the others, a PNG file is made with the pixels as vLLM and the loaders
of transformers' processors show them: turned, on white, the first frame alone. What models are shown, and
the hash of an image among tokens, are of that file.
"""

from __future__ import annotations

import base64
import io
import struct
import zlib
from functools import lru_cache
from typing import Any

from agentenv.core.errors import DependencyMissing, RenderError
from agentenv.core.images import image_file, image_size, url_of
from agentenv.core.messages import ContentPart, Message

__all__ = ["picture_of", "pictured"]

_ORIENTATION = 0x0112
"""Number of the EXIF field that says how to turn an image."""
_BLOCK = 65_535
"""Most bytes of a stored block (RFC 1951, 3.2.4)."""


def picture_of(data: bytes) -> bytes:
    """Return the file of the picture that models see; the given one if all loaders show it alike.

    Raises:
        DependencyMissing: Pillow is not installed.
        RenderError: The file is no whole image, or has too many pixels.
    """
    image_size(data)  # before anything is decoded
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise DependencyMissing.of("pillow", "train", purpose="images") from None
    try:
        with Image.open(io.BytesIO(data)) as opened:
            opened.load()
            turned = opened.getexif().get(_ORIENTATION, 1) != 1
            shown: Any = ImageOps.exif_transpose(opened) if turned else opened
            if not turned and not _is_transparent(shown):
                return data
            if _is_transparent(shown) and shown.mode != "RGB":  # no loader looks for a transparent colour
                layers = shown.convert("RGBA")
                shown = Image.new("RGB", layers.size, (255, 255, 255))
                shown.paste(layers, mask=layers.getchannel("A"))
            return _png(shown.convert("RGB").tobytes(), *shown.size)
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise RenderError(
            f"an image cannot be decoded: {type(error).__name__}: {error}",
            remedy="send a whole PNG, JPEG, WebP or GIF file",
        ) from error


def pictured(message: Message) -> Message:
    """Return a message with the pictures that models see in the place of its files; broken files stay."""
    content = message.get("content")
    if not isinstance(content, list) or not any(map(url_of, content)):
        return message
    return {**message, "content": list(map(_pictured_part, content))}


def _pictured_part(part: ContentPart) -> ContentPart:
    given = url_of(part)
    shown = _picture_url(given) if given else ""
    if shown == given:
        return part
    return {"type": "image_url", "image_url": {**part.get("image_url", {}), "url": shown}}


@lru_cache(maxsize=32)
def _picture_url(url: str) -> str:
    try:
        data = image_file(url)
        picture = picture_of(data)
    except (RenderError, DependencyMissing):
        return url
    return url if picture is data else f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def _is_transparent(image: Any) -> bool:
    return image.mode in {"RGBA", "RGBa", "LA", "La", "PA"} or "transparency" in image.info


def _png(pixels: bytes, width: int, height: int) -> bytes:
    """Return pixels as a PNG file.

    It is not compressed, because equal pixels must have equal hashes and compressors differ by their version.
    """
    row = 3 * width
    rows = b"".join(b"\0" + pixels[at : at + row] for at in range(0, row * height, row))
    blocks = [rows[at : at + _BLOCK] for at in range(0, len(rows), _BLOCK)]
    stored = b"".join(
        struct.pack("<BHH", number == len(blocks), len(block), len(block) ^ 0xFFFF) + block
        for number, block in enumerate(blocks, start=1)
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = b"\x78\x01" + stored + struct.pack(">I", zlib.adler32(rows))
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
