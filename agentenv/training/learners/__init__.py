"""What holds the weights in training: `torch` trains them on this machine's CPUs and GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.training.learners import torch as torch

__all__ = door(__name__)
