"""Two attempts at a question, with rewards for correcting a wrong first answer.

The environment follows SCoRe (Kumar et al. 2024, arXiv 2409.12917): the model answers, is asked to look for
a mistake in its answer without being told whether there is one, and answers again. If r1 and r2 are the
correctness of the two answers (0 or 1), the second turn gets

    r2 + alpha * (r2 - r1)

This is the paper's shaped reward of the second attempt in its stage II, where alpha is a positive constant,
best above 1; the paper uses 10. With `stage=2`, the first turn gets r1 + alpha * r1, so that both turns
together get r1 + (1 + alpha) * r2: two right answers are best whatever credit the trainer gives a turn. With
r1 alone, as in the paper's sum over both attempts, a wrong answer that is put right would earn more than two
right ones where a turn is credited with the whole episode, and a model would learn to fail first. (Rewards
that add the difference of a potential change no best policy: Ng et al., ICML 1999.) With `stage=1`, the first
turn gets 0, because the paper's stage I trains the second attempt alone. The strong
KL penalty of stage I, which keeps the first attempt close to the base model, belongs to the trainer, which
reads from `context.attempt` which turn is which (`train.kl_weights`); examples/score.py trains both stages.

The rewards' named parts `first_correct` and `second_correct` are r1 and r2; they add nothing to the reward.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence

from agentenv.core import Message, Outcome, UsageError, derive_seed
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
    """Answer a question, check the answer, and answer again.

    Args:
        alpha: weight of the progress from the first attempt to the second.
        stage: 2 rewards both attempts, 1 rewards only the second.

    Raises:
        UsageError: A value is out of range.
    """

    def __init__(self, alpha: float = 2.0, stage: int = 2) -> None:
        if alpha < 0:
            raise UsageError(f"alpha must be 0 or more, not {alpha}")
        if stage not in {1, 2}:
            raise UsageError(f"stage must be 1 or 2, not {stage!r}")
        self.alpha = alpha
        self.stage = stage
        self.full_marks = 2 + alpha if stage == 2 else 1 + alpha
        self._first: float | None = None
        self._second: float | None = None

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[str, dict[str, object]]:
        """Ask the question."""
        self._first = self._second = None
        return f"{self.task['question']} End with the final number.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Score an attempt; ask again after the first, and end after the second."""
        right = float(_last_number(action) == self.task["answer"])
        if self._first is None:
            self._first = right
            self.context.attempt = 1
            shaped = right + self.alpha * right if self.stage == 2 else 0.0
            return ASK_AGAIN, shaped, False, False, {"correct": right}
        self._second = right
        shaped = right + self.alpha * (right - self._first)
        return "", shaped, True, False, {"correct": right, "first_correct": self._first}

    def finish(self, stop_reason: str) -> Outcome:
        """Name which attempts were right, without a further reward."""
        parts = {"first_correct": self._first, "second_correct": self._second}
        return Outcome(0.0, {name: right for name, right in parts.items() if right is not None})


def tasks(split: str) -> Iterator[dict[str, object]]:
    """Yield the tasks of a split; the splits have no pair of factors in common."""
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
    """Give the right answer in both attempts."""
    return {"role": "assistant", "content": f"The answer is {task['answer']}."}


def _last_number(text: str) -> int | None:
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    digits = numbers[-1].replace(",", "")
    # No right answer is nearly as long, and Python refuses to parse numbers with thousands of digits.
    return int(digits) if len(digits) <= _MAX_DIGITS else None


register(
    "agentenv/SelfCorrection-v0",
    SelfCorrection,
    tasks={"train": _train, "test": _test},
    max_turns=2,
)
