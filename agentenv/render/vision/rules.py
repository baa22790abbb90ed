"""The rules of families of models: which tokens an image of a size becomes.

A chat template writes one placeholder for an image, and the processor of the model replaces it with as many
tokens as the vision tower returns vectors. The rules here compute the same from the size alone, without
pixels. `tests/slow` compares each with the processor of transformers.

Each image is expanded by itself, and its ids are put between those of the texts around it. So no text can
become a part of an image, and what is appended later changes nothing before it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from agentenv.core.errors import RenderError
from agentenv.core.images import PreparedImage

__all__ = ["FAMILIES", "ImageRule", "Settings", "StandInRule", "find_rule"]

Settings: TypeAlias = Mapping[str, Any]
"""The JSON object of a configuration file."""
_MAX_ASPECT = 200
"""Largest ratio of the sides of an image that Qwen's processor takes."""
_MAX_KNOWN = 1024
"""Most sizes whose tokens are remembered."""
_MAX_SIDE = 4096
"""Longest side of an image in Idefics3's processor."""


class ImageRule(ABC):
    """What an image becomes in one family of models.

    Args:
        config: `config.json` of the model.
        processor: settings of its image processor; what is missing has the value of transformers.
        token_id: returns the id of a token, or None.
        encode: returns the ids of plain text.

    Raises:
        RenderError: The tokenizer lacks a token of the family, or a setting is not supported.
    """

    processors: ClassVar[tuple[str, str]] = ("", "")
    """Module and class of the processor in transformers that makes the tensors."""
    placeholder: str
    """Text of the token that stands for a vector of the tower."""

    def __init__(
        self,
        config: Settings,
        processor: Settings,
        token_id: Callable[[str], int | None],
        encode: Callable[[str], list[int]],
    ) -> None:
        self.family = str(config.get("model_type", ""))
        self.settings = dict(processor)
        """Settings of the processor, which are recorded with a run."""
        self._token_id, self._encode = token_id, encode
        self.image_id = self._id(self.placeholder)
        """The id of the placeholder."""
        self._known: dict[tuple[int, int], PreparedImage] = {}

    def prepare(self, width: int, height: int) -> PreparedImage:
        """Return what an image of so many pixels becomes.

        Raises:
            RenderError: The processor of the model would refuse it.
        """
        if (width, height) not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[width, height] = self._prepare(width, height)
        return self._known[width, height]

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that no model may sample, because they would be taken for images."""
        return (self.image_id,)

    @property
    def collapsed(self) -> tuple[int, ...]:
        """The tokens of an image as a chat template writes them, which vLLM expands."""
        return (self.image_id,)

    @abstractmethod
    def _prepare(self, width: int, height: int) -> PreparedImage: ...

    def _id(self, token: str) -> int:
        token_id = self._token_id(token)
        if token_id is None:
            raise RenderError(
                f"the tokenizer of this {self.family} model has no token {token!r}, which images need",
                remedy="load the tokenizer that belongs to the model",
            )
        return token_id


class QwenRule(ImageRule):
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a placeholder for each square of patches, row by row."""

    processors = ("qwen2_vl", "Qwen2VLImageProcessorPil")
    placeholder = "<|image_pad|>"

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids of placeholders of images and videos."""
        return (self.image_id, self._id("<|video_pad|>"))

    @property
    def collapsed(self) -> tuple[int, ...]:
        """One placeholder between the tokens that open and close an image."""
        return (self._id("<|vision_start|>"), self.image_id, self._id("<|vision_end|>"))

    def _prepare(self, width: int, height: int) -> PreparedImage:
        patch, merge = self.settings.get("patch_size", 14), self.settings.get("merge_size", 2)
        size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280, **self.settings.get("size", {})}
        least = self.settings.get("min_pixels") or size["shortest_edge"]
        most = self.settings.get("max_pixels") or size["longest_edge"]
        rows, columns = _whole_squares(height, width, patch * merge, least, most)
        first, pad, last = self.collapsed
        return PreparedImage((first, *[pad] * (rows * columns), last), (rows, columns))


def _whole_squares(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Return how many squares of a side an image has, once it has between `least` and `most` pixels.

    This is `smart_resize` of Qwen's processor.
    """
    if max(height, width) / min(height, width) > _MAX_ASPECT:
        raise RenderError(
            f"an image of {width} x {height} pixels is too narrow for this model",
            remedy=f"the longer side may be {_MAX_ASPECT} times the shorter one",
        )
    rows, columns = round(height / side), round(width / side)
    pixels = rows * columns * side * side
    if pixels > most:
        shrink = math.sqrt(height * width / most)
        rows = max(1, math.floor(height / shrink / side))
        columns = max(1, math.floor(width / shrink / side))
    elif pixels < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
    return rows, columns


class TilesRule(ImageRule):
    """SmolVLM and Idefics3: tiles, each behind a token with its row and column, then the whole image."""

    processors = ("idefics3", "Idefics3ImageProcessorPil")
    placeholder = "<image>"

    def __init__(self, config: Settings, processor: Settings, *tokens: Any) -> None:
        super().__init__(config, processor, *tokens)
        vision = config.get("vision_config") or {}
        side = vision.get("image_size", 224) // vision.get("patch_size", 32)
        self._per_tile = side**2 // config.get("scale_factor", 2) ** 2
        self._fake, self._whole = self._id("<fake_token_around_image>"), self._id("<global-img>")

    def _prepare(self, width: int, height: int) -> PreparedImage:
        rows, columns = self._tiles(height, width)
        tile, line = [self.image_id] * self._per_tile, self._encode("\n")
        ids: list[int] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                ids += [self._fake, self._id(f"<row_{row}_col_{column}>"), *tile]
            # The line break of the last row and that before the whole image stand together.
            ids += line if row < rows else self._encode("\n\n")
        return PreparedImage((*ids, self._fake, self._whole, *tile, self._fake))

    def _tiles(self, height: int, width: int) -> tuple[int, int]:
        if not self.settings.get("do_image_splitting", True):
            return 0, 0
        tile = (self.settings.get("max_image_size") or {"longest_edge": 364})["longest_edge"]
        longest = (self.settings.get("size") or {"longest_edge": 4 * 364})["longest_edge"]
        if self.settings.get("do_resize", True):
            height, width = _to_longest(height, width, longest)
            if max(height, width) > _MAX_SIDE:
                height, width = _to_longest(height, width, _MAX_SIDE, even=False)
        ratio = width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        rows, columns = height // tile, width // tile
        return (0, 0) if rows <= 1 and columns <= 1 else (rows, columns)


def _to_longest(height: int, width: int, longest: int, *, even: bool = True) -> tuple[int, int]:
    """Return height and width with a longest side of `longest`, as Idefics3's processor rounds them."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2 if even else 0
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2 if even else 0
    return max(height, 1), max(width, 1)


class SmolRule(TilesRule):
    """SmolVLM, whose processor is a copy of Idefics3's."""

    processors = ("smolvlm", "SmolVLMImageProcessorPil")


class GemmaRule(ImageRule):
    """Gemma 3: the same number of placeholders for each image, which see each other in both directions."""

    processors = ("gemma3", "Gemma3ImageProcessorPil")
    placeholder = "<image_soft_token>"

    def __init__(self, config: Settings, processor: Settings, *tokens: Any) -> None:
        super().__init__(config, processor, *tokens)
        if processor.get("do_pan_and_scan"):
            raise RenderError(
                "this Gemma 3 crops images (do_pan_and_scan), which depends on more than one image",
                remedy="set do_pan_and_scan to false in preprocessor_config.json",
            )
        count = int(config.get("mm_tokens_per_image", 256))
        frame, first, last = self._encode("\n\n"), self._id("<start_of_image>"), self._id("<end_of_image>")
        self._prepared = PreparedImage((*frame, first, *[self.image_id] * count, last, *frame))

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """The placeholder, and the token that opens an image."""
        return (self.image_id, self._id("<start_of_image>"))

    def _prepare(self, width: int, height: int) -> PreparedImage:
        return self._prepared


class StandInRule(ImageRule):
    """Engines without a model: a fixed number of tokens that mean nothing, so that episodes can be played."""

    placeholder = "<|endoftext|>"

    def _prepare(self, width: int, height: int) -> PreparedImage:
        return PreparedImage((self.image_id,) * 16)


FAMILIES: Mapping[str, type[ImageRule]] = {
    "qwen2_vl": QwenRule,
    "qwen2_5_vl": QwenRule,
    "qwen3_vl": QwenRule,
    "smolvlm": SmolRule,
    "idefics3": TilesRule,
    "gemma3": GemmaRule,
}
"""The rule of each family, by `model_type` of its configuration."""


def find_rule(
    path: Path,
    read: Callable[[Path], Mapping[str, Any]],
    token_id: Callable[[str], int | None],
    encode: Callable[[str], list[int]],
) -> tuple[ImageRule | None, str]:
    """Return the rule of the model in a directory, and why there is none.

    Args:
        path: the directory.
        read: reads a JSON file; what does not exist is empty.
        token_id: returns the id of a token.
        encode: returns the ids of plain text.
    """
    config = read(path / "config.json")
    family = str(config.get("model_type", ""))
    if "vision_config" not in config:
        return None, "the model has no eyes: its config.json names no vision_config"
    if family not in FAMILIES:
        return None, f"models of type {family!r} have no rule for images; there are {', '.join(FAMILIES)}"
    # transformers 5 writes one file for the whole processor, older ones one for images.
    whole = read(path / "processor_config.json").get("image_processor")
    processor = whole if isinstance(whole, dict) else read(path / "preprocessor_config.json")
    try:
        return FAMILIES[family](config, processor, token_id, encode), ""
    except RenderError as error:
        return None, str(error)
