"""Countdown: make a number from four others with + - * /, using each of the four at most once.

There are 800 training and 200 held-out tasks. Each is made backwards from a solution, and no set of numbers
is in both splits. The model may try an expression with a tool before it answers.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import permutations, product
from typing import cast

import agentenv as ae
from agentenv.core import Message, derive_seed
from agentenv.testing import tool_call_message

__all__ = ["Countdown", "oracle", "value_of"]

_SIZES = {"train": 800, "test": 200}
_EXPRESSION = re.compile(r"[\d(][\d+\-*/() ]*")
_OPERATORS: Mapping[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}

_APPLY: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Countdown(ae.ToolEnv):
    """Reach a number from four others with the four operations."""

    system_prompt = "Solve the number puzzle. Answer with the expression alone, as in (1 + 2) * 3 - 4."

    def start(self, numbers: list[int], goal: int) -> str:
        """Pose the puzzle."""
        self._numbers, self._target = numbers, goal
        told = ", ".join(map(str, numbers))
        return f"Make {goal} from the numbers {told} with + - * / and brackets; each at most once."

    @ae.tool
    def try_out(self, expression: str) -> str:
        """Say what an expression comes to, and whether it keeps the rules.

        Args:
            expression: such as (1 + 2) * 3.
        """
        return f"= {value_of(expression, self._numbers)}"

    def reward(self, answer: str, stop_reason: str) -> float:
        """Return 1 if the longest expression of the answer reaches the target by the rules, otherwise 0."""
        expressions = _EXPRESSION.findall(answer.partition("=")[0])
        if stop_reason != "final_answer" or not expressions:
            return 0.0
        try:
            return float(value_of(max(expressions, key=len), self._numbers) == self._target)
        except ae.ToolError:
            return 0.0


def value_of(expression: str, numbers: Sequence[int]) -> Fraction:
    """Return the exact value of an expression of the given numbers.

    Raises:
        ToolError: The expression breaks the rules.
    """
    if len(expression) > 200:
        raise ae.ToolError("an expression has at most 200 characters")
    left = list(numbers)
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, left)
    except ZeroDivisionError as error:
        raise ae.ToolError("division by zero") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ae.ToolError("this is not an expression of numbers, + - * / and brackets") from error


def _value(node: ast.expr, left: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        if node.value not in left:
            raise ae.ToolError(f"the number {node.value} is not there, or used already")
        left.remove(node.value)
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        raise ValueError(ast.dump(node))
    first, second = _value(node.left, left), _value(node.right, left)
    match _OPERATORS[type(node.op)]:
        case "+":
            return first + second
        case "-":
            return first - second
        case "*":
            return first * second
        case _:
            return first / second


def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
    """Search for a solution, try it out, and answer with it."""
    numbers, target = cast("list[int]", task["numbers"]), int(str(task["goal"]))
    solution = next(text for text, value in _expressions(numbers) if value == target)
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": solution}
    return tool_call_message("try_out", expression=solution)


def _expressions(numbers: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield every expression that has the form of the tasks' solutions, with its value."""
    for a, b, c, d in permutations(numbers):
        for first, second, third in product(_APPLY, repeat=3):
            value = _APPLY[third](_APPLY[second](_APPLY[first](a, b), c), d)
            yield f"(({a} {first} {b}) {second} {c}) {third} {d}", value


def _tasks(split: str) -> list[dict[str, object]]:
    draw = random.Random(derive_seed("countdown", split))
    tasks: dict[str, dict[str, object]] = {}
    while len(tasks) < _SIZES[split]:
        numbers = sorted(draw.sample(range(1, 26), 4))
        held_out = derive_seed("countdown", *numbers) % 5 == 0
        a, b, c, d = draw.sample(numbers, 4)
        first, second, third = (draw.choice("+-*") for _ in range(3))
        target = value_of(f"(({a} {first} {b}) {second} {c}) {third} {d}", numbers)
        if held_out == (split == "test") and 10 <= target <= 999:
            id = "-".join(map(str, (*numbers, target)))
            tasks[id] = {"id": id, "numbers": draw.sample(numbers, 4), "goal": int(target)}
    return list(tasks.values())


def _train() -> list[dict[str, object]]:
    return _tasks("train")


def _test() -> list[dict[str, object]]:
    return _tasks("test")


ae.register("agentenv/Countdown-v0", Countdown, tasks={"train": _train, "test": _test}, max_turns=6)
