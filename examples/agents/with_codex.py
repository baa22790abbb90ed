"""Codex edits files in a directory; `npm install -g @openai/codex`.

agentenv eval examples/agents/with_codex.py -m vllm:PATH -o limits.max_context_tokens=65536

Its first request has some 7,000 tokens, so the model needs a long context. Its commands run in Codex's own
sandbox, which may write to the workspace; where the machine has none, they fail.
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
        return ["codex", "exec", "--skip-git-repo-check", "--sandbox", "workspace-write", task]

    def reward(self, workspace: Path) -> float:
        return float("return a + b" in (workspace / "add.py").read_text())
