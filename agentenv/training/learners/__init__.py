"""What holds the weights in training: `torch` trains them on this machine's CPUs and GPUs."""

from __future__ import annotations

from agentenv.core.door import door

__all__ = door(__name__, {}, packages=["torch"])
