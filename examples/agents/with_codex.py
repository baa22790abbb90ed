"""Codex edits files in a directory; it must be installed as `codex`.

agentenv eval examples/agents/with_codex.py -m vllm:PATH -o limits.max_context_tokens=65536

Its commands run on this machine as you. Run models that you do not trust on a machine of their own.
"""

from pathlib import Path

import agentenv as ae

TASKS = [{"wrong": "a - b"}, {"wrong": "a * b"}]


class FixBug(ae.AgentEnv):
    """Correct a function so that it passes its check."""

    tasks = TASKS

    def start(self, wrong: str) -> None:
        (self.workspace / "add.py").write_text(f"def add(a, b):\n    return {wrong}\n")

    def command(self) -> list[str]:
        task = "The function in add.py must add its arguments. Correct it."
        return ["codex", "exec", "--skip-git-repo-check", "--full-auto", task]

    def reward(self, workspace: Path) -> float:
        return float("return a + b" in (workspace / "add.py").read_text())
