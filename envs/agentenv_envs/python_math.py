"""Questions about numbers that are hard in the head and easy with a few lines of Python.

The model writes code, the sandbox runs it, and the last number of the answer is compared with the right one.
The idea is from ReTool (Feng et al. 2025, arXiv 2504.11536), where the code is part of the text; here it is
a tool call. The questions come from eight families, and no question is in both splits.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal

from agentenv.core import Message, derive_seed, text_of
from agentenv.envs import register
from agentenv.testing import tool_call_message
from agentenv_envs.sandboxed import SandboxedEnv
from agentenv_tools.python import python_session

__all__ = ["PythonMath", "oracle", "tasks"]

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_SIZES = {"train": 600, "test": 200}

_FAMILIES: dict[str, tuple[str, str]] = {
    "primes": (
        "How many prime numbers are there from {a} to {b}, both included?",
        "print(sum(all(n % d for d in range(2, int(n ** 0.5) + 1)) for n in range(max({a}, 2), {b} + 1)))",
    ),
    "digits": (
        "What is the sum of the decimal digits of {a} to the power {k}?",
        "print(sum(map(int, str({a} ** {k}))))",
    ),
    "modulo": ("What is the remainder of {a} to the power {b} divided by {m}?", "print(pow({a}, {b}, {m}))"),
    "factorial": (
        "With how many zeros does the factorial of {a} end?",
        "n, zeros = {a}, 0\nwhile n := n // 5:\n    zeros += n\nprint(zeros)",
    ),
    "divisors": (
        "How many positive divisors does {b} have?",
        "print(sum({b} % d == 0 for d in range(1, {b} + 1)))",
    ),
    "coprime": (
        "How many whole numbers from 1 to {b} have no divisor above 1 in common with {m}?",
        "import math\nprint(sum(math.gcd(n, {m}) == 1 for n in range(1, {b} + 1)))",
    ),
    "paths": (
        "In how many ways can {k} people be chosen out of {c}?",
        "import math\nprint(math.comb({c}, {k}))",
    ),
    "palindromes": (
        "How many numbers from {a} to {b}, both included, read the same from both ends in base 2?",
        "print(sum(bin(n)[2:] == bin(n)[:1:-1] for n in range({a}, {b} + 1)))",
    ),
}


class PythonMath(SandboxedEnv):
    """Answer a question about numbers with the help of Python."""

    system_prompt = "Use the python tool to work out the answer, then reply with the number."
    tools = (python_session,)

    async def start(self, question: str, family: str, numbers: Mapping[str, int]) -> str:
        """Ask the question."""
        await self.sandbox()
        self._want = _solve(family, numbers)
        return question

    def reward(self, answer: str, stop_reason: str) -> float:
        """Return 1 if the model gave a final answer whose last number is right, otherwise 0."""
        answers = _NUMBER.findall(answer)
        # Exactly: above 2**53 a float does not tell neighbours apart.
        right = bool(answers) and Decimal(answers[-1].replace(",", "")) == self._want
        return float(stop_reason == "final_answer" and right)


def tasks(split: str) -> Iterator[dict[str, object]]:
    """Yield the tasks of a split, which are the same on every machine."""
    draw = random.Random(derive_seed("python-math", split))
    seen: set[str] = set()
    while len(seen) < _SIZES[split]:
        family = draw.choice(sorted(_FAMILIES))
        a, m = draw.randint(100, 2000), draw.randint(50, 999)
        b, k, c = a + draw.randint(100, 4000), draw.randint(5, 30), draw.randint(35, 60)
        numbers = {"a": a, "b": b, "c": c, "k": k, "m": m}
        question = _FAMILIES[family][0].format(**numbers)
        held_out = derive_seed("python-math question", question) % 4 == 0
        if question in seen or held_out != (split == "test"):
            continue
        seen.add(question)
        name = f"{family}-{derive_seed(question):x}"
        yield {"id": name, "question": question, "family": family, "numbers": numbers}


def _solve(family: str, numbers: Mapping[str, int]) -> int:
    a, b, c, k, m = (numbers[name] for name in "abckm")
    return _SOLVERS[family](a, b, c, k, m)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def _gcd(a: int, b: int) -> int:
    return a if b == 0 else _gcd(b, a % b)


def _zeros(n: int) -> int:
    return n // 5 + _zeros(n // 5) if n else 0


def _choose(n: int, k: int) -> int:
    ways = 1
    for i in range(k):
        ways = ways * (n - i) // (i + 1)
    return ways


_SOLVERS: dict[str, Callable[[int, int, int, int, int], int]] = {
    "primes": lambda a, b, c, k, m: sum(map(_is_prime, range(a, b + 1))),
    "digits": lambda a, b, c, k, m: sum(map(int, str(a**k))),
    "modulo": lambda a, b, c, k, m: pow(a, b, m),
    "factorial": lambda a, b, c, k, m: _zeros(a),
    "divisors": lambda a, b, c, k, m: sum(b % d == 0 for d in range(1, b + 1)),
    "coprime": lambda a, b, c, k, m: sum(_gcd(n, m) == 1 for n in range(1, b + 1)),
    "paths": lambda a, b, c, k, m: _choose(c, k),
    "palindromes": lambda a, b, c, k, m: sum(f"{n:b}" == f"{n:b}"[::-1] for n in range(a, b + 1)),
}


def _train() -> list[dict[str, object]]:
    return list(tasks("train"))


def _test() -> list[dict[str, object]]:
    return list(tasks("test"))


def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
    """Solve a task: call the tool with the right code, then answer with its output."""
    results = [text_of(message) for message in messages if message["role"] == "tool"]
    if results:
        return {"role": "assistant", "content": f"The answer is {results[-1].strip()}."}
    numbers: Mapping[str, int] = task["numbers"]  # pyright: ignore[reportAssignmentType]
    code = _FAMILIES[str(task["family"])][1].format(**numbers)
    return tool_call_message("python", code=code)


register(
    "agentenv/PythonMath-v0",
    PythonMath,
    tasks={"train": _train, "test": _test},
    max_turns=4,
    sandbox="auto",
)
