"""The environment that `runner_peers.py` plays with verifiers, whose env workers import it by this name."""

from __future__ import annotations

from typing import Any

QUESTION = "Read the pages and answer."


def load_environment(text: str, turns: int, count: int) -> Any:
    """Return an environment whose tool answers with the text; an episode has one turn more than `turns`."""
    import verifiers as vf
    from datasets import Dataset

    def look(page: int) -> str:
        """Look at a page.

        Args:
            page: Its number.
        """
        return text

    async def answered(completion: Any) -> float:
        return 1.0 if len(completion) == 2 * turns + 1 else 0.0

    rows = Dataset.from_list([{"question": QUESTION, "answer": "", "number": n} for n in range(count)])
    return vf.ToolEnv(dataset=rows, tools=[look], max_turns=turns + 1, rubric=vf.Rubric(funcs=[answered]))
