"""Images in the live rows of the transformers engine.

The scheduler, and what is kept, compare keys (`agentenv.core.images.keys_of`), so different images never
share anything. Here keys become token ids again, and the vectors, positions and masks of a pass are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from agentenv.core.errors import UsageError
from agentenv.core.images import ImageTokens, check_images, image_size, keys_of, place_in
from agentenv.engine.hf.buffers import RowBuffers
from agentenv.engine.hf.vision import Features, Kept, Vision

__all__ = ["Held", "Sight"]


class Held:
    """An image that a request needs."""

    def __init__(self, image: ImageTokens, ids: Sequence[int]) -> None:
        self.image = image
        self.ids = ids


class Sight:
    """What the rows of one model see.

    Args:
        vision: what the model sees with.
        model: the model, without adapters around it.
        buffers: its keys and values, beside which positions are kept.
    """

    # Invariant: the vectors in `_features` are those of the present weights.

    def __init__(self, vision: Vision, model: Any, buffers: RowBuffers) -> None:
        self.vision = vision
        self._model = model
        self._buffers = buffers
        self._held: WeakValueDictionary[int, Held] = WeakValueDictionary()
        self._features = Kept[Features](lambda one: one.nbytes)
        self.passed = 0
        """Number of images that passed the tower."""

    def keys(self, prompt: Sequence[int], images: Sequence[ImageTokens]) -> tuple[list[int], list[Held]]:
        """Return the keys of a prompt, and its images, which are known as long as these objects exist.

        Raises:
            UsageError: A placeholder belongs to no image, or an image has other tokens than its rule says.
        """
        check_images(images, len(prompt))
        keys, held = keys_of(prompt, images), []
        for image in images:
            ids = self.vision.rule.prepare(*image_size(image.data)).ids
            if tuple(prompt[image.offset : image.end]) != ids:
                raise UsageError(
                    f"the tokens {image.offset} to {image.end} are not those of the image "
                    f"{image.sha256[:12]} in this model",
                    remedy="render the prompt with the tokenizer and the processor settings of the model",
                )
            number, _ = place_in(keys[image.offset])
            known = self._held.get(number)
            if known is None or known.image.sha256 != image.sha256:
                known = self._held[number] = Held(image.moved(-image.offset), ids)
            held.append(known)
        if stray := next((one for one in self.vision.banned_ids if one in keys), None):
            raise UsageError(
                f"the prompt has the placeholder {stray} without an image",
                remedy="pass images= beside the prompt, as the renderer returns them",
            )
        return keys, held

    def forget(self) -> None:
        """Forget what older weights have seen."""
        self._features.clear()

    def chunks(self, keys: Sequence[int], size: int) -> list[Sequence[int]]:
        """Cut keys into chunks of about so many, none of which ends inside an image."""
        cuts = [0]
        while cuts[-1] < len(keys):
            cut = min(cuts[-1] + size, len(keys))
            if cut < len(keys) and keys[cut] < 0 and (inside := place_in(keys[cut])[1]):
                before = cut - inside
                cut = before if before > cuts[-1] else before + len(self._held[place_in(keys[cut])[0]].ids)
            cuts.append(cut)
        return [keys[a:b] for a, b in pairwise(cuts)]

    def read(self, rows: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[ImageTokens]]]:
        """Return the token ids of rows of keys, and the images of each row by their places."""
        found: list[list[ImageTokens]] = []
        read: list[list[int]] = []
        for row in rows:
            ids, images, place = list(row), list[ImageTokens](), 0
            while place < len(ids):
                if ids[place] >= 0:
                    place += 1
                    continue
                held = self._held[place_in(ids[place])[0]]
                ids[place : place + len(held.ids)] = held.ids
                images.append(held.image.moved(place))
                place += len(held.ids)
            read.append(ids)
            found.append(images)
        return read, found

    def vectors(self, images: Sequence[Sequence[ImageTokens]]) -> dict[str, Any]:
        """Return the argument of a forward pass with the vectors of its images."""
        once = {image.sha256: image for row in images for image in row}
        known = {sha256: made for sha256 in once if (made := self._features.find(sha256)) is not None}
        missing = [image for sha256, image in once.items() if sha256 not in known]
        for image, made in zip(missing, self.vision.features(self._model, missing), strict=True):
            known[image.sha256] = self._features.keep(image.sha256, made)
        self.passed += len(missing)
        return self.vision.together([known[image.sha256] for row in images for image in row])

    def begin(
        self, images: Sequence[Sequence[ImageTokens]], depths_BT: Tensor, counts: Sequence[int]
    ) -> Tensor:
        """Return the positions of a prefill pass; see `end` for what the buffers need of them.

        Args:
            images: the images of each row, by their columns.
            depths_BT: position of each column among the tokens of its row.
            counts: number of new tokens of each row, which stand on the right.
        """
        if not self.vision.turns_around:
            return depths_BT
        first = len(self._buffers.lengths) - len(counts)
        width, parts = depths_BT.shape[1], list[Tensor]()
        for row, (own, count) in enumerate(zip(images, counts, strict=True)):
            pad = width - count
            start = self._buffers.next_position(first + row)
            new, _ = self.vision.positions(count, [image.moved(-pad) for image in own], start)
            parts.append(torch.cat([torch.zeros(3, pad, dtype=torch.long), new], 1))
        turned_3BT = torch.stack(parts, 1).to(depths_BT.device)
        return torch.cat([depths_BT[None], turned_3BT])

    def step(self, depths_B1: Tensor) -> Tensor:
        """Return the positions of a decoding pass."""
        if not self.vision.turns_around:
            return depths_B1
        rows = range(len(self._buffers.lengths))
        following = torch.tensor([self._buffers.next_position(row) for row in rows], device=depths_B1.device)
        return torch.cat([depths_B1[None], following[None, :, None].expand(3, -1, -1)])

    def end(self, positions: Tensor) -> None:
        """Keep the position after each token beside its keys and values."""
        if self.vision.turns_around:
            self._buffers.record_positions(positions[1:].amax(0).cummax(1).values + 1)

    def unmask(
        self,
        masks: Tensor | dict[str, Tensor],
        images: Sequence[Sequence[ImageTokens]],
        depths_BT: Tensor,
        windows: Mapping[str, int | None],
    ) -> Tensor | dict[str, Tensor]:
        """Let the placeholders of an image see each other in both directions, where the family does so."""
        if self.vision.packs:
            return masks
        named = masks if isinstance(masks, dict) else {"all": masks}
        for row, own in enumerate(images):
            for image in own:
                ids = self.vision.rule.prepare(*image_size(image.data)).ids
                first = image.offset + ids.index(self.vision.rule.image_id)
                tokens = slice(first, first + ids.count(self.vision.rule.image_id))
                places = depths_BT[row, tokens]
                distance = places[:, None] - places
                for name, mask in named.items():
                    window = windows[name]
                    seen = distance < (window if window is not None else len(places))
                    block = mask[row, 0, tokens, int(places[0]) : int(places[-1]) + 1]
                    block.masked_fill_(seen, 0.0)
        return masks
