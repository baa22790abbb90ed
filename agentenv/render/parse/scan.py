"""The text of a completion, in which control tokens differ from text that only looks like them.

All searches together are linear in the length: the last result for each tag is cached, so that even a
hostile completion full of opening tags is parsed in linear time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentenv.render.control import ControlSet
    from agentenv.render.tokenizer import ChatTokenizer

__all__ = ["TurnText"]


class TurnText:
    """Decoded text with the positions of its control tokens.

    A tag that is a control token of the vocabulary is found only where that token was sampled. Any
    other tag is found in the text.

    Args:
        text: the decoded completion.
        places: start positions of each control token in ascending order, by its string.
        control: the control strings of the vocabulary.
        token_ids: the decoded token ids; empty if the text has none.
    """

    __slots__ = ("_control", "_covered", "_inside", "_memo", "_places", "text", "token_ids")

    def __init__(
        self,
        text: str,
        places: Mapping[str, Sequence[int]],
        control: ControlSet,
        token_ids: Sequence[int] = (),
    ) -> None:
        self.text = text
        self.token_ids = token_ids
        self._places = places
        self._control = control.strings
        self._inside = control.inside
        self._covered = sorted(
            (start, start + len(tag)) for tag, starts in places.items() for start in starts
        )
        self._memo: dict[str, tuple[int, int]] = {}

    @classmethod
    def decode(
        cls,
        token_ids: Sequence[int],
        tokenizer: ChatTokenizer,
        control: ControlSet,
        names: Mapping[int, str],
    ) -> TurnText:
        """Decode a completion; runs of ordinary tokens are decoded together.

        Args:
            token_ids: the completion.
            tokenizer: decodes the ordinary tokens.
            control: the control strings of the vocabulary.
            names: the control strings by id.
        """
        pieces: list[str] = []
        places: dict[str, list[int]] = {}
        length = start = 0
        for index, token_id in enumerate(token_ids):
            string = names.get(token_id)
            if string is None:
                continue
            if start < index:
                pieces.append(tokenizer.decode(token_ids[start:index]))
                length += len(pieces[-1])
            places.setdefault(string, []).append(length)
            pieces.append(string)
            length += len(string)
            start = index + 1
        if start < len(token_ids):
            pieces.append(tokenizer.decode(token_ids[start:]))
        return cls("".join(pieces), places, control, token_ids)

    def find(self, tag: str, start: int = 0) -> int:
        """Return the first position of the tag at or after `start`, or -1."""
        # A cached result holds for every start between that of its search and the position it found.
        searched_from, position = self._memo.get(tag, (len(self.text) + 1, -1))
        if searched_from <= start and (position == -1 or position >= start):
            return position
        position = self._search(tag, start)
        self._memo[tag] = (start, position)
        return position

    def at(self, tag: str, position: int) -> bool:
        """Return True if the tag is exactly at this position."""
        if tag in self._control:
            starts = self._places.get(tag, ())
            index = bisect_left(starts, position)
            return index < len(starts) and starts[index] == position
        return self.text.startswith(tag, position) and self._real(tag, position)

    def first_control(self, start: int = 0) -> int:
        """Return the start of the first control token at or after `start`, or -1."""
        index = bisect_left(self._covered, (start, 0))
        return self._covered[index][0] if index < len(self._covered) else -1

    def _search(self, tag: str, start: int) -> int:
        if tag in self._control:
            starts = self._places.get(tag, ())
            index = bisect_left(starts, start)
            return starts[index] if index < len(starts) else -1
        position = self.text.find(tag, start)
        while position >= 0 and not self._real(tag, position):
            position = self.text.find(tag, position + 1)
        return position

    def _real(self, tag: str, start: int) -> bool:
        """Return True if no control token overlaps an edge of the tag and those inside it were sampled."""
        for edge in (start, start + len(tag)):
            index = bisect_left(self._covered, (edge, 0))
            if index > 0 and self._covered[index - 1][1] > edge:
                return False
        return all(self.at(string, start + offset) for offset, string in self._inside(tag))
