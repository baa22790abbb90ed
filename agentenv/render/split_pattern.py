"""Translate the pattern that a tokenizer splits text with into one of Python's `re`, exactly or not at all.

Tokenizers split with Oniguruma, whose character classes differ from those of `re`. Two rules make the
translation exact:

1. A translation holds for a set of characters, its domain. The regex engine of the tokenizer itself is
   asked which characters of the domain each class matches, and the class is written out as that set.
2. Only what both engines read alike is translated: literals, classes, groups, alternatives, lookahead and
   the usual quantifiers. Everything else raises `Untranslatable`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

__all__ = ["NOTHING", "Untranslatable", "char_class", "members", "translate"]

NOTHING = r"[^\U00000000-\U0010ffff]"
"""A class without any character."""

_ESCAPED = re.compile(r"\\(?:[pP]\{\^?[A-Za-z_]+\}|[sSdDwWrntfv]|[^A-Za-z0-9\s])")
_CLASS = re.compile(rf"\[\^?(?:{_ESCAPED.pattern}|[^\\\[\]])+\]")
_GROUP = re.compile(r"\((?:\?:|\?=|\?!|\?i:)?")
_QUANTIFIER = re.compile(r"(?:[?*+]|\{\d+(?:,\d*)?\})")
_AFTER_QUANTIFIER = re.compile(r"[?*+{]")
_LITERAL = re.compile(r"[^\\\[\](){}.^$|?*+]", re.DOTALL)


class Untranslatable(ValueError):
    """The pattern has a part that the two regex engines may read differently."""


def translate(pattern: str, domain: str) -> str:
    """Return a pattern of `re` that matches texts of the domain's characters as Oniguruma matches `pattern`.

    Raises:
        Untranslatable: The pattern is not one that can be translated exactly.
    """
    if "(?i" in pattern:
        _check_folding(pattern, domain)
    parts: list[str] = []
    cases = [False]  # whether each open group ignores case
    position = 0
    while position < len(pattern):
        position, part = _next(pattern, position, domain, cases)
        parts.append(part)
    if len(cases) != 1:
        raise Untranslatable(f"a group of {pattern!r} is not closed")
    return "".join(parts)


def _next(pattern: str, position: int, domain: str, cases: list[bool]) -> tuple[int, str]:
    """Return the end of the next part of a pattern and its translation."""
    character = pattern[position]
    if character == "|":
        return position + 1, "|"
    if character == ")" and len(cases) > 1:
        cases.pop()
        return _quantified(pattern, position + 1, ")")
    if match := _GROUP.match(pattern, position):
        opened = match.group()
        if pattern[match.end() : match.end() + 1] == "?":
            raise Untranslatable(f"{pattern!r} has a group of another kind")
        cases.append(cases[-1] or opened == "(?i:")
        return match.end(), opened if opened in {"(?=", "(?!"} else "(?:"
    for atom in (_CLASS, _ESCAPED, _LITERAL):
        if match := atom.match(pattern, position):
            return _quantified(pattern, match.end(), _atom(match.group(), domain, folded=cases[-1]))
    raise Untranslatable(f"{pattern!r} has {character!r} at {position}")


def _quantified(pattern: str, position: int, part: str) -> tuple[int, str]:
    """Return a part with the quantifier that follows it; stacked quantifiers mean different things."""
    match = _QUANTIFIER.match(pattern, position)
    if match is None:
        return position, part
    if _AFTER_QUANTIFIER.match(pattern, match.end()):
        raise Untranslatable(f"{pattern!r} has two quantifiers in a row")
    return match.end(), part + match.group()


def _atom(atom: str, domain: str, *, folded: bool) -> str:
    if len(atom) == 1 and not folded:
        return re.escape(atom)
    if atom.startswith("[") and "&&" in atom:
        raise Untranslatable(f"the class {atom} intersects others")
    return char_class(members(f"(?i:{atom})" if folded else atom, domain))


@lru_cache(maxsize=64)
def members(atom: str, domain: str) -> str:
    """Return the characters of the domain that a class matches, as the tokenizer's own regex engine says."""
    gaps = Split(Regex(f"(?:{atom})+"), "removed").pre_tokenize_str(domain)
    found: list[str] = []
    end = 0
    for _, (start, stop) in gaps:
        found.append(domain[end:start])
        end = stop
    return "".join([*found, domain[end:]])


def char_class(characters: Iterable[str]) -> str:
    """Return a class of `re` with these characters; without any it matches nothing."""
    codes = sorted(map(ord, characters))
    if not codes:
        return NOTHING
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges) + "]"


def _check_folding(pattern: str, domain: str) -> None:
    """Refuse a domain with a character that stands for several of the pattern when case is ignored."""
    folded = pattern.casefold()
    for character in domain:
        fold = character.casefold()
        if len(fold) > 1 and fold in folded:
            raise Untranslatable(f"{character!r} folds to {fold!r}, which stands in {pattern!r}")
