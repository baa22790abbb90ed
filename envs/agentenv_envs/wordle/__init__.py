"""Wordle: find a five-letter word in six guesses.

The words are common English ones, listed in `words.txt`, which was written for this environment
and stands under its licence. One word in four is held out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import agentenv as ae
from agentenv.core import Message, derive_seed, text_of

__all__ = ["Wordle", "marks", "oracle", "solver", "words"]

GUESSES = 6
_GUESS = re.compile(r"\b[a-z]{5}\b")


@cache
def words() -> tuple[str, ...]:
    """Return every word that may be looked for."""
    return tuple((Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split())


def marks(guess: str, word: str) -> str:
    """Return one letter for each letter guessed: G right, Y elsewhere in the word, X absent.

    A letter is marked as often as the word has it, right places first.
    """
    left = [letter for letter, other in zip(word, guess, strict=True) if letter != other]
    told: list[str] = []
    for letter, other in zip(guess, word, strict=True):
        if letter == other:
            told.append("G")
        elif letter in left:
            left.remove(letter)
            told.append("Y")
        else:
            told.append("X")
    return "".join(told)


class Wordle(ae.Env):
    """Guess a five-letter word."""

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[str, dict[str, object]]:
        """Choose the task's word."""
        self._word = str(self.task.get("word", "crane"))
        self._guesses: list[str] = []
        return (
            f"Find a secret English word of 5 letters in {GUESSES} guesses; end each message with one. "
            "Each letter is then marked: G is right, Y is elsewhere in the word, X is not in it."
        ), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Mark the last five-letter word of the message."""
        found = _GUESS.findall(action.lower())
        if not found or len(found[-1]) != 5:
            return "No guess of 5 letters found. Name one.", 0.0, False, False, {}
        guess = found[-1]
        self._guesses.append(guess)
        told = marks(guess, self._word)
        won, left = guess == self._word, GUESSES - len(self._guesses)
        if won or not left:
            return f"{guess} {told}: {'found' if won else 'not found'}.", float(won), True, False, {}
        return f"{guess} {told}. {left} guesses left.", 0.0, False, False, {}


def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> str:
    """Name the word: the solution that the checker needs."""
    return str(task["word"])


def solver(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> str:
    """Play fairly: guess a word that all marks so far allow."""
    seen = [re.match(r"(\w{5}) ([GYX]{5})", text_of(message)) for message in messages]
    known = [(found[1], found[2]) for found in seen if found]
    fitting = [word for word in words() if all(marks(guess, word) == told for guess, told in known)]
    return rng.choice(fitting)


def _held_out(word: str) -> bool:
    return derive_seed("wordle", word) % 4 == 0


def _train() -> list[dict[str, object]]:
    return [{"id": word, "word": word} for word in words() if not _held_out(word)]


def _test() -> list[dict[str, object]]:
    return [{"id": word, "word": word} for word in words() if _held_out(word)]


ae.register("agentenv/Wordle-v0", Wordle, tasks={"train": _train, "test": _test}, max_turns=8)
