"""Images in requests to vLLM servers.

vLLM expands images itself, and always does: it replaces one placeholder with as many as its own processor
says, and would take placeholders that are already expanded for further images. So a request has one
placeholder for each image, with the files beside it in order. The server returns the ids that it made of
them, and they are compared with ours on every request: a difference in settings, versions or backends is an
error, and never a quiet difference between what is sampled and what is trained.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from pydantic_core import to_json

from agentenv.core.errors import EngineError, UsageError
from agentenv.core.images import ImageTokens, check_images, suffix_of
from agentenv.render.vision.rules import ImageRule

__all__ = ["ServerSight"]

NEVER = -100.0
"""Bias of a logit that makes its probability 0 in float32; vLLM takes no lower one."""
_TYPES = {"jpg": "jpeg"}


class ServerSight:
    """What requests to the servers of one model need for images.

    Args:
        rule: what images become in this model.
    """

    def __init__(self, rule: ImageRule) -> None:
        self._rule = rule
        self._settings = to_json([rule.family, rule.settings])

    @property
    def bias(self) -> dict[str, float]:
        """Biases with which the ids of placeholders are never sampled."""
        return {str(token_id): NEVER for token_id in self._rule.banned_ids}

    def collapsed(self, prompt: Sequence[int], images: Sequence[ImageTokens]) -> list[int]:
        """Return a prompt with one placeholder for each image.

        Raises:
            UsageError: The prompt has a placeholder that belongs to no image.
        """
        check_images(images, len(prompt))
        collapsed: list[int] = []
        end = 0
        for image in (*images, None):
            text = prompt[end : None if image is None else image.offset]
            if not set(self._rule.banned_ids).isdisjoint(text):
                raise UsageError(
                    "the prompt has a placeholder without an image",
                    remedy="pass images= beside the prompt, as the renderer returns them",
                )
            collapsed += text
            if image is not None:
                collapsed += self._rule.collapsed
                end = image.end
        return collapsed

    def parts(self, images: Sequence[ImageTokens]) -> dict[str, Any]:
        """Return the fields of a request with the files of its images."""
        if not images:
            return {}
        return {"content_parts": [self._part(image) for image in images], "return_token_ids": True}

    def _part(self, image: ImageTokens) -> dict[str, str]:
        suffix = suffix_of(image.data)
        # vLLM keeps images by this name alone, so it must name the processor's settings, too.
        name = sha256(image.sha256.encode() + self._settings).hexdigest()
        encoded = base64.b64encode(image.data).decode()
        url = f"data:image/{_TYPES.get(suffix, suffix)};base64,{encoded}"
        return {"type": "image_url", "url": url, "uuid": name}

    def check(self, answer: Mapping[str, Any], prompt: Sequence[int], name: str) -> None:
        """Check that a server saw the tokens that are recorded.

        Raises:
            EngineError: It saw others, or does not say which.
        """
        seen = answer.get("prompt_token_ids")
        if seen == list(prompt):
            return
        told = "did not say which tokens it made of the images"
        if isinstance(seen, list):
            at = next(
                (i for i, pair in enumerate(zip(seen, prompt, strict=False)) if pair[0] != pair[1]), None
            )
            where = f"from token {at} on" if at is not None else "at their end"
            told = f"made {len(seen)} tokens of a prompt of {len(prompt)}, which differ {where}"
        raise EngineError(
            f"{name} {told}: the images would not be those that are trained on",
            remedy="start the server with the same model directory, and with no settings of its own for "
            "images (--mm-processor-kwargs)",
        )
