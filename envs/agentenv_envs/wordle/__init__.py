"""Wordle: find a five-letter word in six guesses.

The words are common English words. Their list, `words.txt`, was written for this environment and has the
same licence. One word in four is held out.
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
    """Return all words that can be the secret word."""
    return tuple((Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split())


def marks(guess: str, word: str) -> str:
    """Return a mark for each letter of the guess: G right, Y elsewhere in the word, X absent.

    A letter is marked at most as often as the word has it, and right positions are marked first.
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
        guesses = _GUESS.findall(action.lower())
        if not guesses or len(guesses[-1]) != 5:
            return "No guess of 5 letters found. Name one.", 0.0, False, False, {}
        guess = guesses[-1]
        self._guesses.append(guess)
        told = marks(guess, self._word)
        won, left = guess == self._word, GUESSES - len(self._guesses)
        if won or not left:
            return f"{guess} {told}: {'found' if won else 'not found'}.", float(won), True, False, {}
        return f"{guess} {told}. {left} guesses left.", 0.0, False, False, {}


def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> str:
    """Guess the secret word at once; the checker plays this solution."""
    return str(task["word"])


def solver(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> str:
    """Play without knowing the word: guess a word that fits all marks so far."""
    seen = [re.match(r"(\w{5}) ([GYX]{5})", text_of(message)) for message in messages]
    known = [(match[1], match[2]) for match in seen if match]
    fitting = [word for word in words() if all(marks(guess, word) == told for guess, told in known)]
    return rng.choice(fitting)


def _held_out(word: str) -> bool:
    return derive_seed("wordle", word) % 4 == 0


def _train() -> list[dict[str, object]]:
    return [{"id": word, "word": word} for word in words() if not _held_out(word)]


def _test() -> list[dict[str, object]]:
    return [{"id": word, "word": word} for word in words() if _held_out(word)]


ae.register("agentenv/Wordle-v0", Wordle, tasks={"train": _train, "test": _test}, max_turns=8)
