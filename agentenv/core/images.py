"""Images among tokens: which tokens an image became, and the file that it is.

Placeholder tokens of two images of one size have the same ids. Equal ids are therefore not equal context, and
wherever contexts are compared, `keys_of` puts numbers in the place of an image's tokens that belong to this
image alone. Token ids go to models, keys are compared.

The size of an image is read from the head of its file. Nothing decodes pixels here, so a file that would
unpack to gigabytes costs no more than its bytes.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Protocol, cast

from agentenv.core.errors import AlignmentError, RenderError

__all__ = [
    "MAX_PIXELS",
    "ImageTokens",
    "PreparedImage",
    "Sees",
    "image_file",
    "image_files",
    "image_size",
    "images_between",
    "keys_of",
    "suffix_of",
]

MAX_PIXELS = 1 << 25
"""Most pixels of an image, 33 million. A larger one is refused before it is decoded."""
_PLACES = 20
"""Bits of a key that say which of an image's tokens it is, so an image has at most 2**20 tokens."""
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The tokens of one image in a span, a sequence or a prompt.

    Raises:
        AlignmentError: The place is none, or the hash is no SHA-256 in hexadecimal digits.
    """

    offset: int
    """Index of the first token."""
    length: int
    """Number of tokens, all of which belong to the image."""
    sha256: str
    """Hash of the picture's file; see `agentenv.core.pictures`."""
    data: bytes = field(default=b"", compare=False, repr=False)
    """The file itself; empty if it is not at hand. It follows from the hash, so it is not compared."""

    def __post_init__(self) -> None:
        if self.offset < 0 or not 0 < self.length < 1 << _PLACES:
            raise AlignmentError(f"an image cannot have {self.length} tokens from index {self.offset} on")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise AlignmentError(f"{self.sha256!r:.80} is no SHA-256 of an image")

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.offset + self.length

    def moved(self, by: int) -> ImageTokens:
        """Return the same image at another place."""
        return replace(self, offset=self.offset + by) if by else self


def check_images(images: Sequence[ImageTokens], length: int) -> None:
    """Check that images are in order, apart and inside a text of so many tokens.

    Raises:
        AlignmentError: They are not.
    """
    end = 0
    for image in images:
        if image.offset < end or image.end > length:
            raise AlignmentError(
                f"the image at tokens {image.offset} to {image.end} overlaps another one or leaves its "
                f"{length} tokens"
            )
        end = image.end


def images_between(images: Iterable[ImageTokens], start: int, end: int) -> tuple[ImageTokens, ...]:
    """Return the images from `start` to before `end`, counted from `start`.

    Raises:
        AlignmentError: An image is cut in two.
    """
    inside = [image for image in images if image.offset < end and image.end > start]
    for image in inside:
        if image.offset < start or image.end > end:
            raise AlignmentError(f"the image at tokens {image.offset} to {image.end} would be cut in two")
    return tuple(image.moved(-start) for image in inside)


def keys_of(ids: Sequence[int], images: Sequence[ImageTokens]) -> list[int]:
    """Return what to compare contexts by: token ids, and negative numbers for the tokens of images.

    The numbers of two images are the same only if their files are.
    """
    keys = list(ids)
    for image in images:
        first = int(image.sha256[:32], 16) << _PLACES
        keys[image.offset : image.end] = range(-1 - first, -1 - first - image.length, -1)
    return keys


def place_in(key: int) -> tuple[int, int]:
    """Return the image that a negative key belongs to, as a number, and which of its tokens it is."""
    return (-1 - key) >> _PLACES, (-1 - key) & ((1 << _PLACES) - 1)


# Files -------------------------------------------------------------------------------------


def image_file(url: str) -> bytes:
    """Return the file in a data URL.

    Raises:
        RenderError: The URL is no data URL of an image, or its base64 is broken.
    """
    match = _DATA_URL.match(url)
    if match is None:
        raise RenderError(
            f"the image {url[:60]!r} is no data URL",
            remedy="send the image itself as data:image/png;base64,...; addresses are not fetched, because "
            "what they name may change",
        )
    try:
        return base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise RenderError(f"the data URL of an image is not valid base64: {error}") from None


def image_files(messages: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yield the files of all images in messages that are data URLs, in order."""
    for message in messages:
        content = message.get("content")
        for part in cast("list[Any]", content) if isinstance(content, list) else ():
            url = url_of(part)
            if url and _DATA_URL.match(url):
                yield image_file(url)


def url_of(part: object) -> str:
    """Return the address in a content part with an image; empty for another part."""
    if not isinstance(part, dict):
        return ""
    shown = cast("dict[str, Any]", part).get("image_url")
    url: object = cast("dict[str, Any]", shown).get("url") if isinstance(shown, dict) else shown
    return url if isinstance(url, str) else ""


def hash_of(data: bytes) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    return sha256(data).hexdigest()


def suffix_of(data: bytes) -> str:
    """Return the usual ending of the image's file name, without a dot; empty for an unknown format."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data.startswith(b"\xff\xd8"):
        return "jpg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return "gif" if data[:6] in {b"GIF87a", b"GIF89a"} else ""


def image_size(data: bytes) -> tuple[int, int]:
    """Return width and height of an image, which are read from the head of its file.

    Raises:
        RenderError: It is no PNG, JPEG, WebP or GIF, or it has no pixels or more than `MAX_PIXELS`.
    """
    kind = suffix_of(data)
    try:
        width, height = _SIZES[kind](data)
    except (KeyError, IndexError, ValueError):
        what = f"a {kind.upper()} file without a size" if kind else "neither PNG, JPEG, WebP nor GIF"
        raise RenderError(f"an image of {len(data)} bytes is {what}", remedy="send a whole PNG") from None
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise RenderError(
            f"an image says that it has {width} x {height} pixels, and at most {MAX_PIXELS:,} are taken",
            remedy="make it smaller before it is sent",
        )
    return width, height


def _png(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR" or len(data) < 24:
        raise ValueError
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


def _gif(data: bytes) -> tuple[int, int]:
    if len(data) < 10:
        raise ValueError
    return int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")


def _webp(data: bytes) -> tuple[int, int]:
    if len(data) < 30:
        raise ValueError
    if data[12:16] == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF


def _jpeg(data: bytes) -> tuple[int, int]:
    place = 2
    while data[place] == 0xFF:
        marker = data[place + 1]
        # SOF0 to SOF15 hold the size; three of their numbers mean other things.
        if 0xC0 <= marker <= 0xCF and marker not in {0xC4, 0xC8, 0xCC}:
            if len(data) < place + 9:
                break
            return int.from_bytes(data[place + 7 : place + 9]), int.from_bytes(data[place + 5 : place + 7])
        place += 1 if marker == 0xFF else 2 + int.from_bytes(data[place + 2 : place + 4])
    raise ValueError


_SIZES = {"png": _png, "jpg": _jpeg, "webp": _webp, "gif": _gif}


# What models need ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """What an image becomes in one family of models, as far as it follows from its size."""

    ids: tuple[int, ...]
    """The tokens in the place of the one placeholder that a chat template writes."""
    grid: tuple[int, int] = (0, 0)
    """Rows and columns of the placeholders, where positions have rows and columns; else (0, 0)."""


class Sees(Protocol):
    """What turns images into arguments of a model's forward pass; see `agentenv.engine.hf.vision`."""

    banned_ids: tuple[int, ...]
    """Ids that stand for parts of images. They are never sampled and have the probability 0."""
    packs: bool
    """Whether rows with images can be packed: they cannot where an image attends to its later tokens."""

    def inputs(
        self,
        model: Any,
        ids_BT: Any,
        images: Sequence[Sequence[ImageTokens]],
        positions_BT: Any | None,
        *,
        frozen: bool,
    ) -> dict[str, Any]:
        """Return the further arguments of a forward pass.

        Args:
            model: the model, without adapters around it.
            ids_BT: the token ids on its device.
            images: the images of each row of the batch, at their columns.
            positions_BT: depth of each token in its sequence; None if it equals the column.
            frozen: whether no gradient goes to the vision tower.
        """
        ...
