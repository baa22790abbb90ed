"""Claude Code edits files in a directory; `npm install -g @anthropic-ai/claude-code`.

agentenv eval examples/agents/with_claude_code.py -m vllm:PATH -o limits.max_context_tokens=65536

Its first request has some 9,000 tokens, so the model needs a long context. Its commands run on this machine
as you. Run models that you do not trust on a machine of their own.
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
        return ["claude", "--print", task, "--permission-mode", "acceptEdits", "--max-turns", "12"]

    def reward(self, workspace: Path) -> float:
        return float("return a + b" in (workspace / "add.py").read_text())
