"""One task: a library with a mistake, the report of it, and its score."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from agentenv.core import SandboxCrashed, SandboxProtocol, TaskError
from agentenv_envs.mini_swe import harness
from agentenv_envs.mini_swe.changes import Change, changed
from agentenv_envs.mini_swe.examples import Session
from agentenv_envs.mini_swe.libraries import INDEXES, Fault, Library, Part, libraries

__all__ = ["Repair", "rows"]

TIMEOUT_S = 30.0
"""Time limit of the hidden tests; on an idle machine they take less than a second."""


def rows(split: str, indexes: str = INDEXES) -> list[dict[str, object]]:
    """Return the tasks of the libraries whose indexes are in a folder, without reading the libraries.

    The tasks name the folder if it is not that of the bundled indexes.
    """
    place = {} if indexes == INDEXES else {"indexes": str(Path(indexes).resolve())}
    return [
        {**_row(library, part, fault), **place}
        for library in libraries(indexes).values()
        if library.split == split
        for part in library.parts.values()
        for fault in part.faults
    ]


def _row(library: Library, part: Part, fault: Fault) -> dict[str, object]:
    change = fault.change
    return {
        "id": f"{part.module}-{change.line}-{change.column}-{change.kind}",
        "library": library.name,
        "version": library.version,
        "path": part.path,
        "line": change.line,
        "column": change.column,
        "kind": change.kind,
        "session": fault.session,
        "example": fault.example,
    }


@dataclass(frozen=True)
class Repair:
    """A task, with what is needed to pose it and to score it."""

    library: Library
    part: Part
    fault: Fault

    @classmethod
    def of(cls, task: Mapping[str, object]) -> Repair:
        """Return the repair that a task asks for.

        Raises:
            TaskError: No index has the task's library, version and file.
        """
        library = libraries(str(task.get("indexes", INDEXES))).get(str(task["library"]))
        part = None if library is None else library.parts.get(str(task["path"]))
        if library is None or part is None or library.version != task["version"]:
            raise TaskError(f"no index has {task['path']} of {task['library']} {task['version']}")
        change = Change(cast("int", task["line"]), cast("int", task["column"]), str(task["kind"]))
        return cls(library, part, Fault(change, str(task["session"]), cast("int", task["example"])))

    @property
    def original(self) -> str:
        """Text of the file without the mistake."""
        return self.library.sources[self.part.path]

    def files(self) -> dict[str, str]:
        """Return the library's files, one of them with the mistake."""
        return {**self.library.sources, self.part.path: changed(self.original, self.fault.change)}

    async def report(self, sandbox: SandboxProtocol) -> str:
        """Return what a user reports: an example, what it should show and what it shows.

        Raises:
            TaskError: The mistake makes no difference here, for instance under another version of Python.
            SandboxCrashed: The published library did not run.
        """
        session = next(s for s in self.library.sessions(self.part) if s.name == self.fault.session)
        number = self.fault.example
        expected = (await self._expected(sandbox))[session.name][number]
        shown = await _observe(sandbox, self.files(), self.part.module, [session])
        if shown is None or shown[0][number] == expected:
            raise TaskError(f"the mistake in {self.part.path} makes no difference with this Python")
        return _REPORT.format(
            library=f"{self.library.name} {self.library.version}",
            module=self.part.module,
            examples="".join(_prompted(source) for source in session.examples[: number + 1]),
            expected=expected or "(nothing)",
            shown=shown[0][number] or "(nothing)",
        )

    async def score(self, sandbox: SandboxProtocol, files: Mapping[str, str]) -> float:
        """Return 1 if all hidden tests of the file show what they show with the published library, else 0.

        Raises:
            SandboxCrashed: The published library did not run.
        """
        expected = await self._expected(sandbox)
        sessions = self.library.sessions(self.part)
        shown = await _observe(sandbox, files, self.part.module, sessions)
        if shown is None:
            return 0.0
        return float(
            all(
                self._same(session, outputs, expected[session.name])
                for session, outputs in zip(sessions, shown, strict=True)
            )
        )

    def _same(self, session: Session, outputs: Sequence[str], expected: Sequence[str]) -> bool:
        """Compare what a session showed, without the examples that do not show the same each time."""
        return len(outputs) == len(expected) and all(
            outputs[number] == expected[number] or f"{session.name}.{number}" in self.part.left_out
            for number in range(len(expected))
        )

    async def _expected(self, sandbox: SandboxProtocol) -> Mapping[str, Sequence[str]]:
        """Return what each session of the published file shows, by its name."""
        sessions = self.library.sessions(self.part)
        recorded = self.library.recorded
        if self.part.path not in recorded:
            outputs = await _observe(sandbox, self.library.sources, self.part.module, sessions)
            if outputs is None:
                raise SandboxCrashed(f"the tests of the published {self.part.path} did not run to their end")
            recorded[self.part.path] = outputs
        return {session.name: recorded[self.part.path][number] for number, session in enumerate(sessions)}


_REPORT = """\
{library} has a mistake. With the names of the module {module}, these examples

{examples}
should at last show

{expected}

but they show

{shown}

Find the mistake in the library and repair it."""


def _prompted(source: str) -> str:
    first, *others = source.rstrip("\n").split("\n")
    return "".join([f">>> {first}\n", *(f"... {line}\n" for line in others)])


async def _observe(
    sandbox: SandboxProtocol, files: Mapping[str, str], module: str, sessions: Sequence[Session]
) -> list[list[str]] | None:
    """Run sessions with files in the sandbox and return what each example shows; None if they do not end."""
    job = {"module": module, "sessions": [session.examples for session in sessions]}
    beside = {path: text for path, text in files.items() if path != harness.OUTPUTS}
    program = inspect.getsource(harness)
    result = await sandbox.run_code(program, files=beside, stdin=json.dumps(job), timeout_s=TIMEOUT_S)
    try:
        outputs = json.loads(await sandbox.read_file(harness.OUTPUTS)) if result.ok else None
    except (FileNotFoundError, ValueError):
        return None
    return outputs if _is_complete(outputs, len(sessions)) else None


def _is_complete(outputs: object, count: int) -> bool:
    """Tell whether the outputs have the right form; code that was repaired may have written anything."""
    if not isinstance(outputs, list):
        return False
    listed = cast("list[object]", outputs)
    return len(listed) == count and all(isinstance(shown, list) for shown in listed)
