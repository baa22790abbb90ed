"""Where agentenv keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_directory"]


def cache_directory() -> Path:
    """Return the directory, which need not exist: `agentenv` in `XDG_CACHE_HOME`, or else in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentenv"
