"""Repair one mistake in a published Python library; hidden tests decide.

A task is a version of a library and a small change of one line. The first message reports an example that
no longer shows what it should. The model lists, reads, searches and edits the library's files and runs code
beside them. In the end the sandbox runs hidden tests, which are the examples of the file's docstrings and
variations of them, and the host compares their outputs with those of the published file.

The libraries are installed by the extra `miniswe`; the repository holds an index of the mistakes alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial

from agentenv.core import DependencyMissing, Message, ToolError, install_line
from agentenv.envs import register
from agentenv.testing import tool_call_message
from agentenv.tools import tool
from agentenv_envs.mini_swe.agents import RepairAgent
from agentenv_envs.mini_swe.libraries import INDEXES, libraries
from agentenv_envs.mini_swe.repair import Repair, rows
from agentenv_envs.sandboxed import SandboxedEnv
from agentenv_tools.python import answer_of

__all__ = ["MiniSWE", "RepairAgent", "oracle", "tasks"]

_MAX_LINES = 120
_MAX_HITS = 40
_MAX_FILE_CHARS = 1_000_000


class MiniSWE(SandboxedEnv):
    """Find and repair a mistake in a library."""

    system_prompt = (
        "Repair the library with the tools: find the mistake, correct it with as small a change as possible, "
        "and try the reported example. Say so when you are done."
    )

    async def start(self, task: Mapping[str, object]) -> str:
        """Put the mistake into the library's files and report it."""
        self._repair = Repair.of(task)
        self.files = self._repair.files()
        return await self._repair.report(await self.sandbox())

    @tool
    def list_files(self) -> str:
        """List the files with their numbers of lines."""
        return "\n".join(f"{path} ({text.count(chr(10))} lines)" for path, text in sorted(self.files.items()))

    @tool
    def read_file(self, path: str, first_line: int = 1, num_lines: int = 60) -> str:
        """Show lines of a file with their numbers.

        Args:
            path: Name of the file.
            first_line: Number of the first line, counted from 1.
            num_lines: How many lines to show, at most 120.
        """
        lines = self._file(path).splitlines()
        first = max(first_line, 1)
        shown = lines[first - 1 : first - 1 + min(max(num_lines, 1), _MAX_LINES)]
        if not shown:
            raise ToolError(f"{path} has {len(lines)} lines")
        return "\n".join(f"{number} {line}" for number, line in enumerate(shown, start=first))

    @tool
    def search(self, text: str) -> str:
        """Find the lines that contain a text, in all files; at most 40 are shown.

        Args:
            text: The text to look for, with upper and lower case as it is written.
        """
        if not text.strip():
            raise ToolError("the text to look for is empty")
        hits = [
            f"{path}:{number}: {line.strip():.160}"
            for path, content in sorted(self.files.items())
            for number, line in enumerate(content.splitlines(), start=1)
            if text in line
        ]
        more = f"\n({len(hits) - _MAX_HITS} more lines)" if len(hits) > _MAX_HITS else ""
        return "\n".join(hits[:_MAX_HITS]) + more if hits else "no line contains this text"

    @tool
    def replace(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs exactly once in a file.

        Args:
            path: Name of the file.
            old: The text to replace, without line numbers.
            new: The text to put there.
        """
        content = self._file(path)
        if (count := content.count(old) if old else 0) != 1:
            raise ToolError(f"the text to replace occurs {count} times in {path}; it must occur exactly once")
        if len(content) + len(new) > _MAX_FILE_CHARS:
            raise ToolError(f"a file has at most {_MAX_FILE_CHARS:,} characters")
        self.files[path] = content.replace(old, new)
        return f"{path} changed"

    @tool
    async def run(self, code: str) -> str:
        """Run Python code beside the files; it can import the library.

        Args:
            code: Python source text; the value of a last expression is printed too.
        """
        sandbox = await self.sandbox()
        return answer_of(await sandbox.run_code(code, files=self.files, echo=True))

    async def reward(self) -> float:
        """Return 1 if the hidden tests show what they show with the published library, otherwise 0."""
        return await self._repair.score(await self.sandbox(), self.files)

    def _file(self, path: str) -> str:
        if path not in self.files:
            raise ToolError(f"no file {path!r:.100}; list_files shows all {len(self.files)}")
        return self.files[path]


def tasks(split: str, indexes: str = INDEXES) -> list[dict[str, object]]:
    """Return the tasks of a split; no library is in both splits.

    Args:
        split: `train` or `test`.
        indexes: folder with the indexes of the libraries; the bundled ones by default.

    Raises:
        DependencyMissing: A library is not installed in the version of its index.
    """
    missing = [library for library in libraries(indexes).values() if library.missing]
    if missing:
        pins = " ".join(f"'{library.name}=={library.version}'" for library in missing)
        raise DependencyMissing(
            f"agentenv/MiniSWE-v0 needs other libraries: {', '.join(library.missing for library in missing)}",
            remedy=install_line("miniswe") if indexes == INDEXES else f"pip install {pins}",
        )
    return rows(split, indexes)


def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
    """Put the original line back, together with so many lines above it that the text occurs once."""
    if any(message["role"] == "tool" for message in messages):
        return {"role": "assistant", "content": "Done."}
    repair = Repair.of(task)
    broken = repair.files()[repair.part.path]
    wrong, right = broken.split("\n"), repair.original.split("\n")
    last = repair.fault.change.line
    first = next(n for n in range(last - 1, -1, -1) if broken.count("\n".join(wrong[n:last])) == 1)
    return tool_call_message(
        "replace", path=repair.part.path, old="\n".join(wrong[first:last]), new="\n".join(right[first:last])
    )


register(
    "agentenv/MiniSWE-v0",
    MiniSWE,
    tasks={"train": partial(tasks, "train"), "test": partial(tasks, "test")},
    max_turns=20,
    sandbox="auto",
    description="Repair a mistake in a published Python library; hidden tests decide.",
)
