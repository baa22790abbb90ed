"""Files with the full text of each tool output that was cut, for people to read."""

from __future__ import annotations

import asyncio
import hashlib
import re
from dataclasses import replace
from pathlib import Path

from agentenv.core.files import make_directory, write_regular
from agentenv.core.messages import ToolResult
from agentenv.core.visible import logger
from agentenv.runner.conversation.fit import TurnAnswer

__all__ = ["FullOutputs", "file_name"]

_log = logger(__name__)


class FullOutputs:
    """Writes the full text of cut tool outputs to files such as `EPISODE/turn-003-call-1.txt`.

    Args:
        directory: directory of the files; created when the first output is written.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def keep(self, episode: str, turn: int, index: int, text: str) -> str:
        """Write one output; return its path in the directory, or an empty string if writing failed."""
        name = Path(file_name(episode)) / f"turn-{turn:03}-call-{index + 1}.txt"
        try:
            make_directory(make_directory(self.directory) / name.parent)
            write_regular(self.directory / name, text.encode("utf-8", "surrogatepass"))
        except OSError as error:
            _log.warning("the full tool output could not be written: %s", error)
            return ""
        return name.as_posix()

    async def keep_whole(self, episode: str, turn: int, whole: TurnAnswer, shown: TurnAnswer) -> TurnAnswer:
        """Write the outputs of a turn that were cut; return the shown answer with the paths of the files."""
        if shown.results == whole.results:
            return shown
        results = await asyncio.to_thread(self._keep_cut, episode, turn, whole.results, shown.results)
        return replace(shown, results=results)

    def _keep_cut(
        self, episode: str, turn: int, whole: tuple[ToolResult, ...], shown: tuple[ToolResult, ...]
    ) -> tuple[ToolResult, ...]:
        named: list[ToolResult] = []
        for index, (before, after) in enumerate(zip(whole, shown, strict=True)):
            if after.content == before.content or not isinstance(before.content, str):
                named.append(after)
            else:
                named.append(replace(after, full_output=self.keep(episode, turn, index, before.content)))
        return tuple(named)


def file_name(name: str) -> str:
    """Return a valid file name; if the name had to be changed, a digest keeps it unique."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".")[:80]
    if clean == name:
        return clean
    return f"{clean}-{hashlib.blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=4).hexdigest()}"
