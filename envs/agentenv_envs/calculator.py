"""Arithmetic questions and a calculator: the smallest task that needs a tool.

There are 800 training and 240 held-out tasks. No pair of operands is in both splits, whatever their order
and operator. An answer is right if its last number is the right one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence

from agentenv.core import Message, derive_seed, text_of
from agentenv.envs import ToolEnv, register
from agentenv.testing import tool_call_message
from agentenv_tools.arithmetic import calculator

__all__ = ["Calculator", "oracle", "tasks"]

_NUMBER = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?")  # noqa: RUF001 - models write the long minus too
_SIZES = {"train": 800, "test": 240}


class Calculator(ToolEnv):
    """Work out "What is 7239 - 4279?" with a calculator."""

    system_prompt = "Use the calculator, then answer with the number."
    tools = (calculator,)

    def start(self, a: int, op: str, b: int) -> str:
        """Ask for the value of one operation."""
        self._want = _value(a, op, b)
        return f"What is {a} {op} {b}?"

    def reward(self, answer: str, stop_reason: str) -> float:
        """Return 1 if the model gave a final answer whose last number is right, otherwise 0."""
        return float(stop_reason == "final_answer" and _last_number(answer) == self._want)


def tasks(split: str) -> Iterator[dict[str, object]]:
    """Yield the tasks of a split, which are the same on every machine."""
    draw = random.Random(derive_seed("calculator", split))
    seen: set[str] = set()
    while len(seen) < _SIZES[split]:
        op = draw.choice("+-*")
        least, most = (101, 999) if op == "*" else (1001, 9999)
        a, b = draw.randint(least, most), draw.randint(least, most)
        name = f"{a}{op}{b}"
        if name in seen or _split_of(a, b) != split:
            continue
        seen.add(name)
        yield {"id": name, "a": a, "op": op, "b": b}


def _train() -> list[dict[str, object]]:
    return list(tasks("train"))


def _test() -> list[dict[str, object]]:
    return list(tasks("test"))


def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
    """Solve a task: call the tool, then answer with its result."""
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": text_of(messages[-1])}
    return tool_call_message("calculator", expression=f"{task['a']} {task['op']} {task['b']}")


def _value(a: int, op: str, b: int) -> int:
    return a + b if op == "+" else a - b if op == "-" else a * b


def _split_of(a: int, b: int) -> str:
    low, high = sorted((a, b))
    return "test" if derive_seed("calculator operands", low, high) % 4 == 0 else "train"


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None  # noqa: RUF001 - see above


register(
    "agentenv/Calculator-v0",
    Calculator,
    tasks={"train": _train, "test": _test},
    max_turns=3,
)
