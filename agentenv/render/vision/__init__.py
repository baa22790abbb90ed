"""What an image becomes among the tokens of a model, one rule for each family of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.render.vision.rules import FAMILIES as FAMILIES
    from agentenv.render.vision.rules import ImageRule as ImageRule
    from agentenv.render.vision.rules import find_rule as find_rule

__all__ = door(__name__)
