"""Put the ids of images between those of the texts around them.

While a template renders, a word that stands in no text takes the place of each image. The rendered text is
cut there, its parts are encoded one by one, and the ids of the image come between them. So the ids of an
image never pass the encoder, and no text can become one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

from agentenv.core.errors import RenderError
from agentenv.core.images import ImageTokens, hash_of, image_file, image_size, url_of
from agentenv.core.messages import Message
from agentenv.core.pictures import picture_of
from agentenv.core.sequence import Prompt
from agentenv.render.vision.rules import ImageRule

__all__ = ["Splicer"]


class Splicer:
    """The images of one render.

    Args:
        rule: what an image becomes; None if the model sees none.
        reason: why there is no rule.
        texts: all texts of the render, none of which has the word that takes an image's place.
    """

    def __init__(self, rule: ImageRule | None, reason: str, texts: Sequence[str]) -> None:
        self._rule, self._reason = rule, reason
        self._seen: list[ImageTokens] = []
        self._ids: list[tuple[int, ...]] = []
        joined = "\n".join(texts)
        self._word = next(word for n in range(len(joined) + 1) if (word := f"IMAGEq7Zk{n}w9") not in joined)

    def text(self, message: Message) -> str:
        """Return the text of a message, with the word in the place of its images.

        Raises:
            RenderError: The model sees no images, the message has a part of another type, or an image is
                not one that can be shown.
        """
        content = message.get("content")
        if not isinstance(content, list):
            return content or ""
        parts: list[str] = []
        for part in content:
            kind = part.get("type")
            if kind == "text":
                parts.append(part.get("text", ""))
            elif kind == "image_url":
                self._add(url_of(part))
                parts.append(self._word)
            else:
                raise RenderError(
                    f"a {message['role']} message has a part of type {kind!r}, which no model here reads",
                    remedy="send parts of type text and image_url",
                )
        return "".join(parts)

    def _add(self, url: str) -> None:
        if self._rule is None:
            raise RenderError(
                f"a message has an image, which cannot be shown to the model: {self._reason}",
                remedy="load a model that sees, use a chat engine such as openai:NAME, or leave the images "
                "out; an environment with images says sends_images = True, so that its episodes are refused "
                "before they are played",
            )
        data, sha256, width, height = _known(url)
        prepared = self._rule.prepare(width, height)
        self._seen.append(ImageTokens(0, len(prepared.ids), sha256, data))
        self._ids.append(prepared.ids)

    def encode(
        self,
        pieces: Sequence[str],
        first: Callable[[Sequence[str]], list[int]],
        later: Callable[[Sequence[str]], list[int]],
    ) -> list[int]:
        """Return the ids of a rendered text with those of its images.

        Args:
            pieces: the rendered text in pieces that are safe to encode.
            first: encodes what stands before the first image.
            later: encodes what follows an image.

        Raises:
            RenderError: The template leaves an image out or shows it twice.
        """
        if not self._seen:
            return first(pieces)
        segments = _cut(pieces, self._word)
        if len(segments) != len(self._seen) + 1:
            raise RenderError(
                f"the chat template shows {len(segments) - 1} of the {len(self._seen)} images of a prompt",
                remedy="pass a chat_template that shows the content of every message once",
            )
        ids = first(segments[0])
        images: list[ImageTokens] = []
        for image, own, segment in zip(self._seen, self._ids, segments[1:], strict=True):
            images.append(image.moved(len(ids)))
            ids += own
            ids += later(segment)
        return Prompt(ids, images)


@lru_cache(maxsize=32)
def _known(url: str) -> tuple[bytes, str, int, int]:
    """Return picture, hash, width and height of a data URL; the members of a group show the same images.

    The file is decoded here, so that a broken one ends its own episode before it is in a batch with others.
    """
    data = picture_of(image_file(url))
    return data, hash_of(data), *image_size(data)


def _cut(pieces: Sequence[str], word: str) -> list[list[str]]:
    """Cut pieces at a word, which may stand across several of them."""
    joined = "".join(pieces)
    ends: list[int] = []
    place = 0
    for piece in pieces:
        place += len(piece)
        ends.append(place)
    segments: list[list[str]] = []
    start = 0
    while start <= len(joined):
        stop = joined.find(word, start)
        stop = len(joined) if stop < 0 else stop
        cuts = [start, *(end for end in ends if start < end < stop), stop]
        segments.append([joined[a:b] for a, b in pairwise(cuts)])
        if stop == len(joined):
            break
        start = stop + len(word)
    return segments
