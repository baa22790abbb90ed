"""The sections of settings that training understands."""

from __future__ import annotations

from collections.abc import Mapping

from agentenv.core.settings import Section
from agentenv.runs.sections import PLAY_SECTIONS
from agentenv.training.config import GRPOConfig

__all__ = ["TRAIN_SECTIONS"]

TRAIN_SECTIONS: Mapping[str, Section] = {
    **{name: PLAY_SECTIONS[name] for name in ("env", "runner", "limits", "engine")},
    "train": Section(GRPOConfig),
}
"""There is no section `sampling`: how training samples is part of `train`, because the loss depends on it."""
