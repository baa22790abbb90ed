"""Estimates of characters per token, used where text is not encoded."""

from __future__ import annotations

__all__ = ["CHARS_PER_TOKEN", "MAX_CHARS_PER_TOKEN"]

CHARS_PER_TOKEN = 4
"""Average for English text and code; used for estimates, for example of what a chat API will count."""
MAX_CHARS_PER_TOKEN = 16
"""Upper bound on the average of any text. A text that is longer than this for each token it may have is cut
before it is encoded, so that a huge output costs no more time than a large one."""
