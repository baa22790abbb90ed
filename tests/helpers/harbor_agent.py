"""An agent of Harbor that runs one line in the container of each task, whatever the task says.

Harbor imports it by this file's name; `tests/e2e/test_real_harbor.py` lets our scripted model call the same line.
"""

from __future__ import annotations

from typing import Any

from harbor.agents.base import BaseAgent

LINE = """cd /app
if [ -e app.log ]; then grep -c ERROR app.log > answer.txt; rm app.log; fi
if [ -e site ]; then tar -czf site.tar.gz site; fi
mkdir -p box; touch box/lid /logs/artifacts/note"""
"""Solves one task, packs too much in another, and leaves a third and the second step of a fourth undone."""


class Scripted(BaseAgent):
    """Run the line."""

    @staticmethod
    def name() -> str:
        return "scripted"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        """Install nothing."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await environment.exec(LINE)
