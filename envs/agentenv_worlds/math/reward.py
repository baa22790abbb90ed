r"""Compare a model's mathematical answer with a reference, by the package math-verify.

1. Numbers, fractions, expressions, sets and equations count as right if they are equal, however they are
   written: `0.5`, `1/2` and `\frac{1}{2}` are the same.
2. The comparison runs in a process of its own, which is kept for the next one. Some expressions, such as
   towers of powers, take for ever; at the time limit the process is killed. If the answer takes as long in a
   process that has started before, it counts as wrong.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from agentenv.core import Context, DependencyMissing, RunLimits, TaskError, ToolErrorKind, UsageError
from agentenv.tools import Tool

__all__ = ["MathReward", "same_answer"]

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

_SEPARATOR = re.compile(r"(?<=\d)_(?=\d{3})")
_POWER = re.compile(r"(?<=\d)\^\{(-?\d+)\}")
_LATEX = re.compile(r"[\\^_{]")
_GROUP = re.compile(r"\{[^{}]*\}")
_WORD = re.compile(r"[A-Za-z]{2,}")

MAX_CHARS = 4_000
"""Only so many characters from the end of an answer are searched; what is right stands at the end."""


_STARTING = Context(limits=RunLimits(tool_timeout_s=300.0))
"""Time in which a new process must have loaded math-verify."""


class MathReward:
    r"""A reward function that is 1 if the answer equals the task's reference, else 0.

    The model's answer is what stands in `\boxed{}` or `<answer>` tags, or else its last expression. The
    reference is a field of the task: a number or an expression, a solution that ends in `\boxed{}`, or text
    as in GSM8K, where the number stands behind `####`. If math-verify cannot read the reference, the
    episode cannot be scored.

    Args:
        field: name of the task's field with the reference.
        timeout_s: time limit of one comparison; an answer that takes longer is wrong.
        name: name of the reward's part.

    Raises:
        DependencyMissing: math-verify is not installed.
        UsageError: The time limit is not positive.
    """

    def __init__(self, field: str = "solution", *, timeout_s: float = 10.0, name: str = "math") -> None:
        DependencyMissing.require("math_verify", extra="math", purpose="MathReward")
        if not timeout_s > 0:
            raise UsageError(f"timeout_s of a MathReward must be positive, not {timeout_s}")
        self.__name__ = name
        self._field = field
        self._compare = Tool.from_function(same_answer, isolated=True)
        self._context = Context(limits=RunLimits(tool_timeout_s=timeout_s))

    async def __call__(self, answer: str, task: Mapping[str, object]) -> float | None:
        """Return 1 or 0, or None if the reference cannot be read."""
        if self._field not in task:
            raise TaskError(
                f"the task has no field {self._field!r}, which MathReward compares with the answer",
                remedy=f"name another field: MathReward(field=...); the task has: {', '.join(task)}",
            )
        reference = str(task[self._field]).rpartition("####")[2].strip()
        tagged = _TAGGED.findall(answer)
        final = str(tagged[-1] if tagged else answer).strip()[-MAX_CHARS:]
        # A lone surrogate, which some tokenizers decode to, cannot be passed to a tool.
        asked = {
            "reference": reference,
            "answer": final.encode(errors="replace").decode(),
            "bare": bool(tagged),
        }
        outcome = await self._compare.call(asked, self._context)
        if outcome.error_kind is ToolErrorKind.TIMEOUT:
            # Perhaps the process was still starting, which is slow on a busy machine: start it and ask again.
            await self._compare.call({"reference": "1", "answer": "1", "bare": True}, _STARTING)
            outcome = await self._compare.call(asked, self._context)
        if not outcome.is_error:
            verdict: bool | None = json.loads(outcome.text)
            return None if verdict is None else float(verdict)
        # Without a traceback the process ended while it read the answer, for example for want of memory.
        if outcome.error_kind is ToolErrorKind.TIMEOUT or not outcome.detail:
            return 0.0
        raise RuntimeError(f"math-verify failed: {outcome.detail}")


def same_answer(reference: str, answer: str, bare: bool) -> bool | None:
    """Return whether an answer equals the reference; None if the reference cannot be read.

    Args:
        reference: the right answer, as text or LaTeX.
        answer: what the model wrote.
        bare: whether the answer is an expression alone, which may be LaTeX without dollar signs.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    expected = _read(reference, bare=True)
    if not expected:
        return None
    return bool(_package().verify(expected, _read(answer, bare=bare), timeout_seconds=None))


def _read(text: str, *, bare: bool) -> list[Any]:
    """Return what math-verify finds in a text; an empty list if that is nothing."""
    parse = _package().parse
    text = _SEPARATOR.sub("", text)
    # In prose without dollar signs, math-verify reads the power 2^{10} as the number 2, but 2**10 as it is.
    plain = text if "$" in text or "\\" in text else _POWER.sub(r"**\1", text)
    texts = [plain]
    if bare:
        texts = [f"${text}$", plain] if _is_latex(text) else [plain, f"${text}$"]
    return next(filter(None, (parse(one, parsing_timeout=None) for one in texts)), [])


def _is_latex(text: str) -> bool:
    """Whether an expression is LaTeX without dollar signs, of which math-verify would find one number only.

    A number with a unit, such as 12 cm^2, is none.
    """
    if "$" in text or "\\boxed" in text or not _LATEX.search(text):
        return False
    return "\\" in text or not _WORD.search(_GROUP.sub("", text))


def _package() -> Any:
    return importlib.import_module("math_verify")
