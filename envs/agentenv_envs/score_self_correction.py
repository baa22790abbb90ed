"""Two attempts at a question, with rewards that pay for correcting oneself.

After SCoRe (Kumar et al. 2024, arXiv 2409.12917): the model answers, is asked to look for a mistake
of its own without being told whether there is one, and answers again. With r1 and r2 the correctness
of both answers (0 or 1), the second turn gets

    r2 + alpha * (r2 - r1)

which is the paper's shaped reward of the second attempt (its section on stage II, where alpha is a
positive constant, best above 1; 10 there). The first turn gets r1 with `stage=2`, as the paper's sum
over both attempts, and 0 with `stage=1`, where the paper trains the second attempt alone. Not taken:
stage I's strong KL penalty that holds the first attempt to the base model, which is the trainer's.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence

from agentenv.core import Message, UsageError, derive_seed
from agentenv.envs import Env, register

__all__ = ["SelfCorrection", "oracle", "tasks"]

ASK_AGAIN = (
    "Your solution may or may not contain a mistake. Go through it again, put right what is wrong, "
    "and end with the final number."
)
_NUMBER = re.compile(r"-?\d[\d,]*")
_MAX_DIGITS = 40
_SIZES = {"train": 400, "test": 120}


class SelfCorrection(Env):
    """Answer, look again, answer better.

    Args:
        alpha: weight of the progress between both attempts.
        stage: 2 rewards both attempts, 1 only the second.

    Raises:
        UsageError: A value is out of range.
    """

    def __init__(self, alpha: float = 2.0, stage: int = 2) -> None:
        if alpha < 0:
            raise UsageError(f"alpha must be 0 or more, not {alpha}")
        if stage not in {1, 2}:
            raise UsageError(f"stage is 1 or 2, not {stage!r}")
        self.alpha = alpha
        self.stage = stage
        self._first: float | None = None

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[str, dict[str, object]]:
        """Ask the question."""
        self._first = None
        return f"{self.task['question']} End with the final number.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Take an attempt: ask again after the first, end after the second."""
        right = float(_last_number(action) == self.task["answer"])
        if self._first is None:
            self._first = right
            return ASK_AGAIN, right if self.stage == 2 else 0.0, False, False, {"correct": right}
        shaped = right + self.alpha * (right - self._first)
        return "", shaped, True, False, {"correct": right, "first_correct": self._first}


def tasks(split: str) -> Iterator[dict[str, object]]:
    """Yield the tasks of a split: sums and products whose numbers no other split has."""
    draw = random.Random(derive_seed("self-correction", split))
    seen: set[str] = set()
    while len(seen) < _SIZES[split]:
        a, b, c = draw.randint(12, 99), draw.randint(12, 99), draw.randint(100, 999)
        name = f"{a}*{b}+{c}"
        if name in seen or (derive_seed("self-correction operands", a, b) % 4 == 0) != (split == "test"):
            continue
        seen.add(name)
        yield {"id": name, "question": f"What is {a} * {b} + {c}?", "answer": a * b + c}


def _train() -> list[dict[str, object]]:
    return list(tasks("train"))


def _test() -> list[dict[str, object]]:
    return list(tasks("test"))


def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
    """Be right at once and stay right."""
    return {"role": "assistant", "content": f"The answer is {task['answer']}."}


def _last_number(text: str) -> int | None:
    found = _NUMBER.findall(text)
    if not found:
        return None
    digits = found[-1].replace(",", "")
    # No answer is nearly as long, and Python refuses to read numbers of thousands of digits.
    return int(digits) if len(digits) <= _MAX_DIGITS else None


register(
    "agentenv/SelfCorrection-v0",
    SelfCorrection,
    tasks={"train": _train, "test": _test},
    max_turns=2,
)
