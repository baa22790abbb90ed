"""Split long texts into passages, and find the keywords of passages. No model is needed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import log

from agentenv.core import UsageError

__all__ = ["keywords_of", "split_passages"]

_SEPARATORS = ("\n\n", "\n", ". ", " ")
"""Where a text is split: as early in this list as gives passages that are short enough."""
_WORD = re.compile(r"\w+(?:['.,:/-]\w+)*")


def split_passages(text: str, max_chars: int = 2000, *, pattern: str = "") -> list[str]:
    r"""Split a text into passages at paragraphs, lines, sentences or words; joined they are the text again.

    Example:
        >>> from agentenv_extras import split_passages
        >>> split_passages("Passage 1: cats.\nPassage 2: dogs.", pattern="^Passage")
        ['Passage 1: cats.\n', 'Passage 2: dogs.']

    Args:
        text: the text.
        max_chars: largest number of characters of a passage.
        pattern: regular expression of a passage's beginning, such as `^Passage \d+`; a passage never goes
            on over such a place.

    Raises:
        UsageError: `max_chars` is below 1, or `pattern` is not a regular expression.
    """
    if max_chars < 1:
        raise UsageError(f"max_chars must be at least 1, not {max_chars}")
    starts = [match.start() for match in _compiled(pattern).finditer(text)] if pattern else []
    sections = [text[start:end] for start, end in pairwise([0, *starts, len(text)])]
    return [passage for section in sections for passage in _packed(section, max_chars)]


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise UsageError(f"{pattern!r} is not a regular expression: {error}") from error


def _packed(text: str, max_chars: int) -> list[str]:
    """Split a text, and join neighbouring pieces again while they fit into one passage."""
    passages: list[str] = []
    for piece in _pieces(text, max_chars, _SEPARATORS):
        if passages and len(passages[-1]) + len(piece) <= max_chars:
            passages[-1] += piece
        else:
            passages.append(piece)
    return passages


def _pieces(text: str, max_chars: int, separators: Sequence[str]) -> Iterator[str]:
    if len(text) <= max_chars:
        if text:
            yield text
    elif not separators:
        yield from (text[start : start + max_chars] for start in range(0, len(text), max_chars))
    else:
        *parts, last = text.split(separators[0])
        for part in [part + separators[0] for part in parts] + [last]:
            yield from _pieces(part, max_chars, separators[1:])


def keywords_of(passages: Sequence[str], ratio: float) -> list[str]:
    """Return the keywords of each passage, in the order of the text: long and rare words, names and numbers.

    Args:
        passages: the passages; words that are in many of them say little about one.
        ratio: how many times shorter than the passage the keywords are, or more.
    """
    words = [list(dict.fromkeys(_WORD.findall(passage))) for passage in passages]
    num_with = Counter(word for known in words for word in {word.lower() for word in known})
    weighted = [
        {word: _weight(word, num_with[word.lower()], len(passages)) for word in known} for known in words
    ]
    return [
        _heaviest(weights, int(len(passage) / ratio))
        for passage, weights in zip(passages, weighted, strict=True)
    ]


def _weight(word: str, num_with: int, num_passages: int) -> float:
    """Return how telling a word is: long, in few passages, and twice as much for names and numbers."""
    special = any(char.isdigit() for char in word) or word[0].isupper()
    return len(word) * log((1 + num_passages) / num_with) * (2 if special else 1)


def _heaviest(weights: Mapping[str, float], max_chars: int) -> str:
    """Return the words with the largest weights that fit, in their order of appearance."""
    chosen: set[str] = set()
    left = max_chars
    for word in sorted(weights, key=lambda word: -weights[word]):
        left -= len(word) + 1
        if left < 0:
            break  # shorter words that would still fit say less
        chosen.add(word)
    return " ".join(word for word in weights if word in chosen)
