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
from agentenv.engine.hf.vision import Features, Kept, Vision

__all__ = ["PromptImage", "Sight"]


class PromptImage:
    """An image that a request needs."""

    def __init__(self, image: ImageTokens, ids: Sequence[int]) -> None:
        self.image = image
        self.ids = ids


class Sight:
    """What the rows of one model see.

    Args:
        vision: what the model sees with.
        model: the model, without adapters around it.
    """

    # Invariant: the vectors in `_features` are those of the present weights.

    def __init__(self, vision: Vision, model: Any) -> None:
        self.vision = vision
        self._model = model
        self._held: WeakValueDictionary[int, PromptImage] = WeakValueDictionary()
        self._features = Kept[Features](lambda one: one.nbytes)
        self.passed = 0
        """Number of images that passed the tower."""

    def keys(
        self, prompt: Sequence[int], images: Sequence[ImageTokens]
    ) -> tuple[list[int], list[PromptImage]]:
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
                known = self._held[number] = PromptImage(image.moved(-image.offset), ids)
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

    def whole(self, keys: Sequence[int], length: int) -> int:
        """Return the greatest length up to the given one that does not end inside an image."""
        inside = place_in(keys[length])[1] if length < len(keys) and keys[length] < 0 else 0
        return min(length, len(keys)) - inside

    def chunks(self, keys: Sequence[int], size: int) -> list[Sequence[int]]:
        """Cut keys into chunks of about so many, none of which ends inside an image."""
        cuts = [0]
        while cuts[-1] < len(keys):
            cut = self.whole(keys, cuts[-1] + size)
            if cut == cuts[-1]:  # an image that is larger than a chunk
                cut += len(self._held[place_in(keys[cut])[0]].ids)
            cuts.append(cut)
        return [keys[a:b] for a, b in pairwise(cuts)]

    def shift(self, keys: Sequence[int]) -> int:
        """Return the position after a row's first tokens, less their number.

        An image of Qwen takes as many positions as it is high or wide, and not one for each of its tokens.
        """
        if not self.vision.turns_around:
            return 0
        return self.vision.positions(len(keys), self._read(keys)[1])[1] - len(keys)

    def positions(self, columns_BT: Tensor, shifts: Sequence[int]) -> Tensor:
        """Return the positions of tokens that are text, from their columns and the shifts of their rows."""
        if not self.vision.turns_around:
            return columns_BT
        moved = columns_BT + torch.tensor(shifts, device=columns_BT.device)[:, None]
        return torch.stack([columns_BT, moved, moved, moved])

    def look(
        self,
        keys: Sequence[int],
        columns_1T: Tensor,
        shift: int,
        masks: Mapping[str, Tensor],
        windows: Mapping[str, int | None],
    ) -> dict[str, Any]:
        """Return the arguments of a forward pass of one row with images, and unmask what these see.

        Args:
            keys: the new tokens.
            columns_1T: their columns.
            shift: that of the tokens before them.
            masks: the additive masks of the pass; changed in place.
            windows: the window of each mask.
        """
        ids, images = self._read(keys)
        self._unmask(masks, images, columns_1T[0], windows)
        positions = columns_1T
        if self.vision.turns_around:
            turned_3T, _ = self.vision.positions(len(ids), images, int(columns_1T[0, 0]) + shift)
            positions = torch.cat([columns_1T[None], turned_3T[:, None].to(columns_1T.device)])
        ids_1T = torch.tensor([ids], device=columns_1T.device)
        return {"input_ids": ids_1T, "position_ids": positions, **self._vectors(images)}

    def _read(self, keys: Sequence[int]) -> tuple[list[int], list[ImageTokens]]:
        """Return the token ids of keys, and the images among them at their places."""
        ids, images, place = list(keys), list[ImageTokens](), 0
        while place < len(ids):
            if ids[place] >= 0:
                place += 1
                continue
            held = self._held[place_in(ids[place])[0]]
            ids[place : place + len(held.ids)] = held.ids
            images.append(held.image.moved(place))
            place += len(held.ids)
        return ids, images

    def _vectors(self, images: Sequence[ImageTokens]) -> dict[str, Any]:
        """Return the argument of a forward pass with the vectors of its images."""
        once = {image.sha256: image for image in images}
        known = {sha256: made for sha256 in once if (made := self._features.find(sha256)) is not None}
        missing = [image for sha256, image in once.items() if sha256 not in known]
        for image, made in zip(missing, self.vision.features(self._model, missing), strict=True):
            known[image.sha256] = self._features.keep(image.sha256, made)
        self.passed += len(missing)
        return self.vision.together([known[image.sha256] for image in images])

    def _unmask(
        self,
        masks: Mapping[str, Tensor],
        images: Sequence[ImageTokens],
        columns_T: Tensor,
        windows: Mapping[str, int | None],
    ) -> None:
        """Let the placeholders of an image see each other in both directions, where the family does so."""
        if self.vision.packs:
            return
        for image in images:
            ids = self.vision.rule.prepare(*image_size(image.data)).ids
            first = image.offset + ids.index(self.vision.rule.image_id)
            tokens = slice(first, first + ids.count(self.vision.rule.image_id))
            places = columns_T[tokens]
            distance = places[:, None] - places
            for name, mask in masks.items():
                window = windows[name]
                seen = distance < (window if window is not None else len(places))
                mask[0, 0, tokens, int(places[0]) : int(places[-1]) + 1].masked_fill_(seen, 0.0)
