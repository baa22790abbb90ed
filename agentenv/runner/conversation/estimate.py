"""How many characters a token has, where nothing is encoded."""

from __future__ import annotations

__all__ = ["CHARS_PER_TOKEN", "MAX_CHARS_PER_TOKEN"]

CHARS_PER_TOKEN = 4
"""On average, of English and of code: for estimates, such as what a chat API will count."""
MAX_CHARS_PER_TOKEN = 16
"""More than a token has on average in any text: what is longer than this for each token that it may have is
cut before it is encoded, so that a huge output costs no more than a large one."""
