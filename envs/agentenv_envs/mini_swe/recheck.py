"""Drop the mistakes of an index that no example shows with this Python; run it with other versions of Python.

python3.13 -m agentenv_envs.mini_swe.recheck indexes/toolz.json
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentenv_envs.mini_swe.build import write_sources, written
from agentenv_envs.mini_swe.forks import in_fork
from agentenv_envs.mini_swe.harness import outputs_of
from agentenv_envs.mini_swe.libraries import Fault, Library, Part
from agentenv_envs.mini_swe.pieces import Pieces

__all__ = ["main"]


def _shown(library: Library, part: Part, folder: Path) -> Iterator[Fault]:
    """Yield the mistakes of a file whose example shows something else than with the published file."""
    pieces = Pieces(library.sources, folder)
    pieces.warm_up(part.module)
    sessions = {session.name: list(session.examples) for session in library.sessions(part)}
    expected: dict[str, list[str] | None] = {}
    for fault in part.faults:
        examples = sessions[fault.session]

        def play(pieces: Pieces, examples: list[str] = examples) -> list[str]:
            return outputs_of(pieces.load(part.module), examples)

        if fault.session not in expected:
            expected[fault.session] = in_fork(lambda: play(pieces))
        mutant = pieces.changed(part.path, fault.change)
        right, wrong = expected[fault.session], in_fork(lambda: play(mutant))  # noqa: B023
        if right is not None and wrong is not None and right[fault.example] != wrong[fault.example]:
            yield fault


def main(arguments: Sequence[str]) -> None:
    """Write each index without the mistakes that make no difference."""
    for file in map(Path, arguments):
        library = Library.read(file)
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        dropped = 0
        with tempfile.TemporaryDirectory(prefix="agentenv-recheck-") as folder:
            write_sources(library.sources, Path(folder))
            for path, part in library.parts.items():
                kept = set(_shown(library, part, Path(folder)))
                faults = content["files"][path]["faults"]
                content["files"][path]["faults"] = [
                    row for row, fault in zip(faults, part.faults, strict=True) if fault in kept
                ]
                dropped += len(faults) - len(kept)
        file.write_text(written(content), encoding="utf-8")
        sys.stdout.write(f"{library.name}: {dropped} dropped\n")


if __name__ == "__main__":
    main(sys.argv[1:])
