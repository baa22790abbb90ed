"""Images in the forward passes of transformers' models that see.

The engine and the trainer call the same functions here, so both give a model the same pixels, positions and
masks. Nothing is left to the model's own bookkeeping: transformers computes positions of images only without
a cache, keeps a state between calls for them, and takes an image on top of a cache for text, all silently.
Therefore the vectors of images (`mm_encoder_outputs`), the positions and, for Gemma 3, what sees what are
always computed here from the whole context.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from agentenv.core.errors import DependencyMissing, RenderError, UsageError
from agentenv.core.images import ImageTokens, image_size

if TYPE_CHECKING:
    from agentenv.render.vision.rules import ImageRule

__all__ = ["Features", "Kept", "Vision", "vision_of"]

KEPT_BYTES = 256 << 20
"""Memory for vectors and pixels of images that are kept for later passes."""


class Features(NamedTuple):
    """What the vision tower makes of one image."""

    vectors: Tensor
    """One vector for each placeholder, or one matrix for each tile."""
    deep: tuple[Tensor, ...] = ()
    """Vectors that are added in the first layers (Qwen3-VL)."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.vectors.nbytes + sum(one.nbytes for one in self.deep)


class Vision:
    """Turns images into arguments of a model's forward pass; see `agentenv.core.images.Sees`.

    Args:
        rule: what images become in this family of models.
    """

    def __init__(self, rule: ImageRule) -> None:
        self.rule = rule
        self.banned_ids = rule.banned_ids
        self.packs = rule.family != "gemma3"
        self.turns_around = rule.family.startswith("qwen")
        """Whether positions have rows and columns (multimodal rotary positions)."""
        self._processor: Any = None
        self._pixels = Kept[dict[str, Tensor]](lambda made: sum(one.nbytes for one in made.values()))

    # Pixels and vectors ---------------------------------------------------------------------

    def pixels(self, image: ImageTokens) -> dict[str, Tensor]:
        """Return what the model's own processor makes of a file.

        Raises:
            RenderError: The file is no whole image.
            UsageError: The file is not at hand, or becomes another number of tokens.
        """
        if (known := self._pixels.find(image.sha256)) is not None:
            return known
        if not image.data:
            raise UsageError(
                f"the image {image.sha256[:12]} of these tokens is not at hand",
                remedy="its file is missing in the run's directory images/, or no longer has its hash",
            )
        self._require_tokens(image)
        return self._pixels.keep(image.sha256, self._processed(image.data))

    def _require_tokens(self, image: ImageTokens) -> None:
        expected = len(self.rule.prepare(*image_size(image.data)).ids)
        if expected != image.length:
            raise UsageError(
                f"the image {image.sha256[:12]} has {image.length} tokens, and {expected} in this model",
                remedy="use the model and the processor settings with which the tokens were made",
            )

    def _processed(self, data: bytes) -> dict[str, Tensor]:
        try:
            from PIL import Image
        except ImportError:
            raise DependencyMissing.of("pillow", "train", purpose="images") from None
        try:
            with Image.open(io.BytesIO(data)) as opened:
                picture = opened.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise RenderError(f"an image cannot be decoded: {type(error).__name__}: {error}") from error
        if self._processor is None:
            module, name = self.rule.processors
            module = f"transformers.models.{module}.image_processing_pil_{module}"
            names = {"image_processor_type", "processor_class", "auto_map", "backend"}
            settings = {key: value for key, value in self.rule.settings.items() if key not in names}
            self._processor = getattr(import_module(module), name)(**settings)
        tiled = self.rule.family in {"smolvlm", "idefics3"}
        made = self._processor(images=[[picture]] if tiled else [picture], return_tensors="pt")
        return {name: value for name, value in made.items() if isinstance(value, Tensor)}

    def features(self, model: Any, images: Sequence[ImageTokens]) -> list[Features]:
        """Return what the tower of a model makes of images. Those of Qwen pass it together."""
        if not self.turns_around and len(images) != 1:
            return [self.features(model, [image])[0] for image in images]
        if not images:
            return []
        pixels = [self.pixels(image) for image in images]
        joined = {name: torch.cat([one[name] for one in pixels]).to(model.device) for name in pixels[0]}
        out = model.model.get_image_features(**joined, return_dict=True)
        made = [Features(out.pooler_output)]
        if self.turns_around:
            layers = getattr(out, "deepstack_features", None) or ()
            made = [
                Features(vectors, tuple(layer[number] for layer in layers))
                for number, vectors in enumerate(out.pooler_output)
            ]
        for image, (vectors, _) in zip(images, made, strict=True):
            wanted = self.rule.prepare(*image_size(image.data)).ids.count(self.rule.image_id)
            if (told := vectors.shape[:-1].numel()) != wanted:
                raise UsageError(
                    f"the vision tower returned {told} vectors for an image of {wanted} placeholders",
                    remedy="check that preprocessor_config.json belongs to this model",
                )
        return made

    def together(self, features: Sequence[Features]) -> dict[str, Any]:
        """Return the argument with which a forward pass takes the vectors of its images, in their order."""
        if not features:
            return {}
        output = _Output()
        if self.turns_around:
            output.pooler_output = tuple(one.vectors for one in features)
            output.deepstack_features = [
                tuple(one.deep[layer] for one in features) for layer in range(len(features[0].deep))
            ]
        else:
            output.pooler_output = torch.cat([one.vectors for one in features])
        return {"mm_encoder_outputs": {"image": output}}

    # Positions and masks --------------------------------------------------------------------

    def positions(self, length: int, images: Iterable[ImageTokens], start: int = 0) -> tuple[Tensor, int]:
        """Return the positions `[3, length]` of tokens (time, row, column), and the position after them.

        Args:
            length: number of tokens.
            images: the images among them, by their places.
            start: position of the first token.
        """
        parts: list[Tensor] = []
        place = 0
        for image in images:
            frame = self._frame(image)
            text = image.offset + frame[0] - place
            parts.append(torch.arange(start, start + text).expand(3, -1))
            start += text
            rows, columns = frame[1]
            row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            square = torch.stack([torch.zeros_like(row), row, column]).flatten(1)
            parts.append(square + start)
            start += max(rows, columns)
            place = image.offset + frame[0] + rows * columns
        parts.append(torch.arange(start, start + length - place).expand(3, -1))
        return torch.cat(parts, dim=1), start + length - place

    def _frame(self, image: ImageTokens) -> tuple[int, tuple[int, int]]:
        """Return how many tokens of an image stand before its placeholders, and their rows and columns."""
        self._require_tokens(image)
        prepared = self.rule.prepare(*image_size(image.data))
        return prepared.ids.index(self.rule.image_id), prepared.grid

    def inputs(
        self,
        model: Any,
        ids_BT: Tensor,
        images: Sequence[Sequence[ImageTokens]],
        positions_BT: Tensor | None,
        *,
        frozen: bool,
    ) -> dict[str, Any]:
        """Return the further arguments of a forward pass; see `agentenv.core.images.Sees`.

        Each distinct image passes the tower once. Images of a packed row are counted by their columns.
        """
        columns = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        depths = columns if positions_BT is None else positions_BT
        inputs: dict[str, Any] = {}
        if self.turns_around:
            turned = [self._turned(*row) for row in zip(depths, images, strict=True)]
            inputs["position_ids"] = torch.stack(turned, 1)
        elif not self.packs:
            inputs["token_type_ids"] = (ids_BT == self.rule.image_id).long()
        with torch.no_grad() if frozen else nullcontext():
            once = {image.sha256: image for row in images for image in row}
            made = dict(zip(once, self.features(model, list(once.values())), strict=True))
        return inputs | self.together([made[image.sha256] for row in images for image in row])

    def _turned(self, depths_T: Tensor, images: Sequence[ImageTokens]) -> Tensor:
        """Return `[4, T]`: depths, which show where sequences of a pack begin, and the three positions.

        Invariant: a token that continues another at the depth before it has the position after it. In a pack,
        a branch begins with a smaller depth, and goes on from the token that has the depth before.
        """
        if not images:
            return depths_T.expand(4, -1)
        depths = depths_T.tolist()
        known: dict[int, int] = {0: 0}  # position of the next token, by its depth, on the path so far
        parts: list[Tensor] = []
        place = 0
        waiting = list(images)
        while place < len(depths):
            stop = place + 1
            while stop < len(depths) and depths[stop] == depths[stop - 1] + 1:
                stop += 1
            own = [image.moved(-place) for image in waiting if image.offset < stop]
            waiting = waiting[len(own) :]
            first = depths[place]
            part, _ = self.positions(stop - place, own, known[first])
            ends = part.amax(0).cummax(0).values + 1
            known |= dict(zip(range(first + 1, first + 1 + stop - place), ends.tolist(), strict=True))
            parts.append(part)
            place = stop
        return torch.cat([depths_T[None].cpu(), torch.cat(parts, 1)]).to(depths_T.device)


class _Output:
    """Stands for the output of a tower; models read its attributes only."""

    pooler_output: Any
    deepstack_features: Any = ()


_T = TypeVar("_T")


class Kept(Generic[_T]):
    """What was made of images, by their hash. The oldest are dropped beyond `KEPT_BYTES`, but not the newest.

    Args:
        size: returns the number of bytes of what was made of an image.
    """

    # Invariant: `_total` is the sum of the sizes of `_made`, whose last entry is the newest.

    def __init__(self, size: Callable[[_T], int]) -> None:
        self._size = size
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._made: dict[str, _T] = {}
        self._total = 0

    def find(self, sha256: str) -> _T | None:
        """Return what is kept of an image, and make it the newest."""
        if (known := self._made.pop(sha256, None)) is not None:
            self._made[sha256] = known
        return known

    def keep(self, sha256: str, made: _T) -> _T:
        """Keep what was made of a new image, and return it."""
        self._made[sha256] = made
        self._total += self._size(made)
        while self._total > KEPT_BYTES and len(self._made) > 1:
            self._total -= self._size(self._made.pop(next(iter(self._made))))
        return made


def vision_of(model: Any, rule: ImageRule | None) -> Vision | None:
    """Return what a model sees with; None if it sees nothing.

    Args:
        model: a model from transformers.
        rule: the rule of the tokenizer beside it.
    """
    if rule is None or not hasattr(model, "get_image_features"):
        return None
    return Vision(rule) if getattr(model.config, "model_type", "") == rule.family else None
