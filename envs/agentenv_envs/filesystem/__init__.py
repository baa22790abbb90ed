"""Chores in a small in-memory file system: move, sum up, rename, delete and copy files.

The model has five tools and no shell, and it cannot reach the real file system. There are 400 training and
200 held-out tasks, whose folders have different names. An episode scores 1 if the files are exactly as the
task wants them in the end, and 0 otherwise.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import agentenv as ae
from agentenv.core import Message
from agentenv_envs.filesystem.chores import make

__all__ = ["FileSystem", "oracle"]

_SIZES = {"train": 400, "test": 200}


class FileSystem(ae.ToolEnv):
    """Tidy up files with tools for listing, reading, writing, moving and deleting."""

    # The calls of a turn run one after another, because their effects depend on their order.

    system_prompt = "You manage files with tools. Do what is asked, then say that it is done."

    def start(self, order: str, files: dict[str, str]) -> str:
        """Put the files in place and give the order."""
        self._files = dict(files)
        return order

    @ae.tool(parallel=False)
    def list_files(self, folder: str = "") -> list[str]:
        """List the paths of all files in a folder and below it.

        Args:
            folder: a folder such as docs; empty for all files.
        """
        inside = folder.strip("/")
        found = sorted(path for path in self._files if not inside or path.startswith(f"{inside}/"))
        if not found:
            raise ae.ToolError(f"no files in {folder[:100]!r}")
        return found

    @ae.tool(parallel=False)
    def read_file(self, path: str) -> str:
        """Return the text of a file.

        Args:
            path: a path such as docs/a.txt.
        """
        return self._files[self._existing(path)]

    @ae.tool(parallel=False)
    def write_file(self, path: str, text: str) -> str:
        """Write a file; what was in it before is lost.

        Args:
            path: a path such as docs/a.txt.
            text: all that the file will hold.
        """
        if len(text) > 10_000:
            raise ae.ToolError("a file holds at most 10000 characters")
        if len(self._files) >= 200:
            raise ae.ToolError("the disk is full: at most 200 files")
        self._files[_clean(path)] = text
        return "written"

    @ae.tool(parallel=False)
    def move_file(self, path: str, target: str) -> str:
        """Move or rename a file.

        Args:
            path: the file.
            target: its new path; no file may be there.
        """
        source, goal = self._existing(path), _clean(target)
        if goal in self._files:
            raise ae.ToolError(f"{goal!r} exists already")
        self._files[goal] = self._files.pop(source)
        return "moved"

    @ae.tool(parallel=False)
    def delete_file(self, path: str) -> str:
        """Delete a file.

        Args:
            path: the file.
        """
        del self._files[self._existing(path)]
        return "deleted"

    def reward(self, want: dict[str, str]) -> float:
        """Return 1 if the files are as the task wants them, except for space around a text, otherwise 0."""
        return float({path: text.strip() for path, text in self._files.items()} == want)

    def _existing(self, path: str) -> str:
        clean = _clean(path)
        if clean not in self._files:
            raise ae.ToolError(f"no file {clean!r}; list_files() shows what there is")
        return clean


def _clean(path: str) -> str:
    parts = [part for part in path.strip().split("/") if part not in {"", "."}]
    if not parts or ".." in parts or len(path) > 200:
        raise ae.ToolError(f"{path[:100]!r} is no path of a file")
    return "/".join(parts)


def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
    """Make the calls that belong to the order, in one turn."""
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": "It is done."}
    split, _, number = str(task["id"]).partition("-")
    plan = make(split, int(number))[1]
    calls: list[Any] = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for index, (name, arguments) in enumerate(plan)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _train() -> list[dict[str, object]]:
    return [make("train", number)[0] for number in range(_SIZES["train"])]


def _test() -> list[dict[str, object]]:
    return [make("test", number)[0] for number in range(_SIZES["test"])]


ae.register("agentenv/FileSystem-v0", FileSystem, tasks={"train": _train, "test": _test}, max_turns=12)
