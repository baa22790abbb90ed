"""Questions about made pictures: which colour, how many, and where. Only a model that sees can answer them.

A picture has one to four squares of one colour in one of its quarters. There are 1,200 training and 240
held-out tasks, whose pictures differ. Whoever guesses one of the offered letters is right in a quarter.
"""

from __future__ import annotations

import random
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence

from agentenv.core import Message, derive_seed
from agentenv.envs import ToolEnv, register
from agentenv.tools import Image

__all__ = ["Pictures", "asked", "oracle", "picture", "tasks"]

COLOURS = {"red": (220, 30, 30), "green": (30, 190, 50), "blue": (40, 60, 220), "yellow": (230, 210, 40)}
COUNTS = ("one", "two", "three", "four")
PLACES = ("northwest", "northeast", "southwest", "southeast")
QUESTIONS = {
    "colour": ("Which colour are the squares?", tuple(COLOURS)),
    "count": ("How many squares are there?", COUNTS),
    "place": ("In which quarter are the squares?", PLACES),
}
LETTERS = "ABCD"
SIDE = 64
_CELL = 16
_SIZES = {"train": 1200, "test": 240}


class Pictures(ToolEnv):
    """Look at a picture and answer one question about it with a letter."""

    sends_images = True
    trivial_limit = 0.35

    def start(self, question: str, colour: str, count: str, place: str, seed: int) -> list[Message]:
        """Show the picture and ask the question."""
        self._want = letter_of({"question": question, "colour": colour, "count": count, "place": place})
        shown = Image(picture(colour, count, place, seed)).to_part()
        return [{"role": "user", "content": [shown, {"type": "text", "text": asked(question)}]}]

    def reward(self, answer: str, stop_reason: str) -> float:
        """Return 1 if the answer has the right letter and no other of those offered, otherwise 0."""
        said = set(re.findall(rf"\b[{LETTERS}]\b", answer))
        return float(stop_reason == "final_answer" and said == {self._want})


def asked(question: str) -> str:
    """Return the text of a question with its four answers."""
    text, words = QUESTIONS[question]
    offered = ", ".join(f"{letter} {word}" for letter, word in zip(LETTERS, words, strict=True))
    return f"{text} {offered}. Answer with the letter."


def letter_of(task: Mapping[str, object]) -> str:
    """Return the letter of the right answer to a task."""
    question = str(task["question"])
    return LETTERS[QUESTIONS[question][1].index(str(task[question]))]


def picture(colour: str, count: str, place: str, seed: int) -> bytes:
    """Return a picture as a PNG file; the seed decides on shades, cells and shifts."""
    draw = random.Random(derive_seed("picture", seed))
    ground = tuple(draw.randint(0, 60) for _ in range(3))
    shade = tuple(min(255, max(0, value + draw.randint(-25, 25))) for value in COLOURS[colour])
    pixels = [[ground] * SIDE for _ in range(SIDE)]
    top, left = divmod(PLACES.index(place), 2)
    for cell in draw.sample(range(4), COUNTS.index(count) + 1):
        row, column = divmod(cell, 2)
        y = (2 * top + row) * _CELL + draw.randint(1, 4)
        x = (2 * left + column) * _CELL + draw.randint(1, 4)
        for line in pixels[y : y + 11]:
            line[x : x + 11] = [shade] * 11
    rows = b"".join(b"\0" + bytes(value for pixel in line for value in pixel) for line in pixels)
    return _png(rows)


def _png(rows: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def tasks(split: str) -> Iterator[dict[str, object]]:
    """Yield the tasks of a split, which are the same on every machine."""
    draw = random.Random(derive_seed("pictures", split))
    for number in range(_SIZES[split]):
        question = list(QUESTIONS)[number % len(QUESTIONS)]
        seen = {
            "colour": draw.choice(list(COLOURS)),
            "count": draw.choice(COUNTS),
            "place": draw.choice(PLACES),
        }
        seed = derive_seed("pictures", split, number) % 2**31
        yield {"id": f"{split}-{number}", "question": question, **seen, "seed": seed}


def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> str:
    """Answer a task from its fields."""
    return letter_of(task)


def _train() -> list[dict[str, object]]:
    return list(tasks("train"))


def _test() -> list[dict[str, object]]:
    return list(tasks("test"))


register(
    "agentenv/Pictures-v0",
    Pictures,
    tasks={"train": _train, "test": _test},
    max_turns=1,
)
