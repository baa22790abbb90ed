"""Find the rule by which the model of a directory sees images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentenv.core.errors import RenderError
from agentenv.render.vision.rules import FAMILIES, ImageRule

__all__ = ["find_rule"]


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
