"""Repair a small Python module with tools that read and change files.

Each task is one of the correct modules in `exercises` with one of the `mistakes`. The model may view, edit
and run the module. In the end, the sandbox calls the function with hidden inputs, and the host compares the
results with the expected values, which never enter the sandbox.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence

from agentenv.core import Message, ToolError, UsageError, derive_seed
from agentenv.envs import register
from agentenv.sandbox import clean_path
from agentenv.testing import tool_call_message
from agentenv.tools import tool
from agentenv_envs.file_edit.exercises import goal_of, names, source_of
from agentenv_envs.file_edit.inputs import INPUTS
from agentenv_envs.file_edit.mistakes import expected, mistakes_in
from agentenv_envs.sandboxed import SandboxedEnv
from agentenv_tools.python import answer_of

__all__ = ["FileEdit", "oracle", "tasks"]

_MAX_FILE_CHARS = 100_000
_MAX_PATH_CHARS = 200
_HELD_OUT = 3
"""Every third function is held out, with all its mistakes."""


class FileEdit(SandboxedEnv):
    """Find and repair one mistake."""

    system_prompt = "Repair the module with the tools. Say so when you are done."

    async def start(self, module: str, line: int, broken: str) -> str:
        """Write the broken module and ask for its repair."""
        await self.sandbox()
        lines = source_of(module).splitlines(keepends=True)
        lines[line] = f"{broken}\n"
        self.name = f"{module}.py"
        self.files = {self.name: "".join(lines)}
        return f"{self.name} has a mistake. It should do this: {goal_of(module)} Repair it."

    @tool
    def list_files(self) -> str:
        """List the files."""
        return "\n".join(sorted(self.files))

    @tool
    def view(self, path: str) -> str:
        """Show a file.

        Args:
            path: Name of the file.
        """
        return self._file(path)

    @tool
    def replace(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs exactly once in a file.

        Args:
            path: Name of the file.
            old: The text to replace.
            new: The text to put there.
        """
        content = self._file(path)
        if (count := content.count(old) if old else 0) != 1:
            raise ToolError(f"the text to replace occurs {count} times in {path}; it must occur exactly once")
        return self.write(path, content.replace(old, new))

    @tool
    def write(self, path: str, content: str) -> str:
        """Write a whole file.

        Args:
            path: Name of the file.
            content: What it shall contain.
        """
        try:
            clean = clean_path(path[: 2 * _MAX_PATH_CHARS])
        except UsageError as error:
            raise ToolError(str(error)) from error
        if len(clean) > _MAX_PATH_CHARS:
            raise ToolError(f"a file name has at most {_MAX_PATH_CHARS} characters, not {len(clean):,}")
        if len(content) > _MAX_FILE_CHARS or len(self.files) > 100:
            raise ToolError(f"at most 100 files of {_MAX_FILE_CHARS:,} characters")
        self.files[clean] = content
        return f"{clean} written"

    @tool
    async def run(self, code: str) -> str:
        """Run Python code beside the files; it can import them.

        Args:
            code: Python source text.
        """
        sandbox = await self.sandbox()
        return answer_of(await sandbox.run_code(code, files=self.files, echo=True))

    async def reward(self, module: str) -> float:
        """Return 1 if the function returns the right values for the hidden inputs, otherwise 0."""
        sandbox = await self.sandbox()
        code = (
            f"import json, sys\nfrom {module} import {module} as function\n"
            "print('\\n' + json.dumps([function(*one) for one in json.load(sys.stdin)]))"
        )
        result = await sandbox.run_code(code, files=self.files, stdin=json.dumps(INPUTS[module]))
        try:
            got = json.loads(result.stdout.rstrip("\n").rpartition("\n")[2])
        except (ValueError, RecursionError):
            return 0.0
        return float(result.ok and got == json.loads(expected(module)))

    def _file(self, path: str) -> str:
        if path not in self.files:
            raise ToolError(f"no file {path!r:.100}; there are: {', '.join(sorted(self.files))}")
        return self.files[path]


def tasks(split: str) -> Iterator[dict[str, object]]:
    """Yield the tasks of a split; no function is in both splits."""
    for index, module in enumerate(names()):
        if (index % _HELD_OUT == 0) == (split == "test"):
            for line, broken in mistakes_in(module):
                name = f"{module}-{line}-{derive_seed(module, broken) % 10**6:06d}"
                yield {"id": name, "module": module, "line": line, "broken": broken}


def _train() -> list[dict[str, object]]:
    return list(tasks("train"))


def _test() -> list[dict[str, object]]:
    return list(tasks("test"))


def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
    """Overwrite the broken module with the correct one, then report it.

    `replace` cannot be used, because the text of the broken line may occur elsewhere in the module, too.
    """
    if any(message["role"] == "tool" for message in messages):
        return {"role": "assistant", "content": "Done."}
    module = str(task["module"])
    return tool_call_message("write", path=f"{module}.py", content=source_of(module))


register(
    "agentenv/FileEdit-v0",
    FileEdit,
    tasks={"train": _train, "test": _test},
    max_turns=8,
    sandbox="auto",
)
