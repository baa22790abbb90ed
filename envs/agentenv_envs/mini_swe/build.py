"""Make the index of a library: try each change of its files, and keep those that an example shows.

    python -m agentenv_envs.mini_swe.build more-itertools --licence MIT --split train --into indexes

1. Each session of the published files runs twice, in interpreters with different hash seeds. Examples that
   show different things are left out, and sessions that take long, concern the time of day, or show
   something else after other sessions.
2. A trace says which sessions run a line. Changes of lines that no session runs are left out.
3. For each other change, the file is imported with it in a fork of this process, and the sessions that run
   its line are played, the docstring's own before the variations. The first example that shows something
   else is kept. Changes that make the import fail, or a session not end, are left out.

A library's code runs in this process and its forks, without a sandbox: name only files that compute.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

from agentenv_envs.mini_swe.changes import Change, candidates
from agentenv_envs.mini_swe.examples import Session, sessions_of
from agentenv_envs.mini_swe.forks import in_fork, show
from agentenv_envs.mini_swe.harness import outputs_of
from agentenv_envs.mini_swe.libraries import checksum, module_of, sources_of
from agentenv_envs.mini_swe.pieces import Pieces

__all__ = ["build", "main", "write_sources", "written"]

_VOLATILE = re.compile(
    r"\b(now|today|utcnow|time\(|sleep|random|shuffle|perf_counter|monotonic|open\(|input\(|tempfile|socket"
    r"|subprocess|urandom|uuid|getpid|environ|threading|Thread|os\.|sys\.|pdb|breakpoint|__file__|timeit)"
)
"""Examples with these words depend on the time, on chance or on the machine."""
_MAX_TRIED = 60
_MAX_REPORT_CHARS = 1200
_PER_LINE = 4


def build(sources: Mapping[str, str], paths: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the files of an index.

    Args:
        sources: the library's files, by path.
        paths: files to make tasks of.
        folder: empty folder, which gets the files.
    """
    write_sources(sources, folder)
    files: dict[str, Any] = {}
    for path in paths:
        if part := _File(sources, path, folder).index():
            files[path] = part
    return files


def write_sources(sources: Mapping[str, str], folder: Path) -> None:
    """Write a library's files into a folder."""
    for path, source in sources.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(source, encoding="utf-8")


class _File:
    """A file that is being indexed."""

    def __init__(self, sources: Mapping[str, str], path: str, folder: Path) -> None:
        self.source = sources[path]
        self.path = path
        self.module = module_of(path)
        self.folder = folder
        self.sessions = {session.name: session for session in sessions_of(self.source)}
        self.pieces = Pieces(sources, folder)

    def index(self) -> dict[str, Any] | None:
        """Return what the index says of the file; None if nothing shows a change of it."""
        if not self.sessions:
            return None
        self.pieces.warm_up(self.module)
        shown = [self._show(seed) for seed in (1, 2)]
        left_out = set(self._left_out(*shown))
        left_out |= set(self._dependent(shown[0], left_out))
        kept = [session for name, session in self.sessions.items() if name not in left_out]
        lines = self._lines(kept)
        faults: list[list[object]] = []
        taken: dict[int, int] = defaultdict(int)
        for change in candidates(self.source):
            if change.line not in lines or taken[change.line] >= _PER_LINE:
                continue
            found = self._seen_by(change, lines[change.line], shown[0], left_out)
            if found is not None:
                taken[change.line] += 1
                faults.append([change.line, change.column, change.kind, *found])
        if not faults:
            return None
        return {"checksum": checksum(self.source), "left_out": sorted(left_out), "faults": faults}

    def _show(self, seed: int) -> dict[str, list[str] | None]:
        """Return what each session shows, in a new interpreter; None for one that fails or takes long."""
        program = f"from {show.__module__} import show; show({str(self.folder)!r}, {self.path!r})"
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        said = subprocess.run(  # noqa: S603
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True, cwd=self.folder
        )
        return json.loads(said.stdout)

    def _left_out(self, *shown: Mapping[str, list[str] | None]) -> Iterator[str]:
        for name, session in self.sessions.items():
            first, second = (outputs[name] for outputs in shown)
            if first is None or second is None or _VOLATILE.search("".join(session.examples)):
                yield name
            else:
                unstable = [number for number in range(len(first)) if first[number] != second[number]]
                if len(unstable) == len(first):
                    yield name
                else:
                    yield from (f"{name}.{number}" for number in unstable)

    def _dependent(self, shown: Mapping[str, list[str] | None], left_out: set[str]) -> Iterator[str]:
        """Yield the sessions that show something else when all run in one process, as the hidden tests do."""
        kept = [session for name, session in self.sessions.items() if name not in left_out]

        def play() -> list[list[str]]:
            module = self.pieces.load(self.module)
            return [outputs_of(module, list(session.examples)) for session in kept]

        together: list[list[str]] = in_fork(play, cpu_s=60.0) or []
        for session, outputs in zip(kept, together, strict=True):
            for number, output in enumerate(outputs):
                if (
                    output != (shown[session.name] or [])[number]
                    and f"{session.name}.{number}" not in left_out
                ):
                    yield session.name

    def _lines(self, sessions: Sequence[Session]) -> Mapping[int, list[str]]:
        """Return the sessions that run each line, by name; the docstring's own first."""
        lines: dict[int, list[str]] = defaultdict(list)
        for session in sorted(sessions, key=lambda s: (s.name.rpartition(".")[2], len("".join(s.examples)))):

            def trace(session: Session = session) -> list[int]:
                module = self.pieces.load(self.module)
                examples = list(session.examples)
                return _traced(lambda: outputs_of(module, examples), str(self.folder / self.path))

            for line in in_fork(trace) or []:
                lines[line].append(session.name)
        return lines

    def _seen_by(
        self,
        change: Change,
        names: Sequence[str],
        shown: Mapping[str, list[str] | None],
        left_out: set[str],
    ) -> tuple[str, int] | None:
        """Return the first session and example that show a change."""
        try:
            mutant = self.pieces.changed(self.path, change)
        except (SyntaxError, ValueError):
            return None

        def play() -> tuple[str, int] | None:
            module = mutant.load(self.module)
            for name in names[:_MAX_TRIED]:
                expected = shown[name] or []
                examples = self.sessions[name].examples
                outputs = outputs_of(module, list(examples))
                for number, output in enumerate(outputs):
                    different = output != expected[number] and f"{name}.{number}" not in left_out
                    if different and len("".join(examples[: number + 1])) <= _MAX_REPORT_CHARS:
                        return name, number
            return None

        found = in_fork(play)
        return None if found is None else (found[0], found[1])


def _traced(run: Callable[[], object], path: str) -> list[int]:
    """Return the lines of a file that a function runs."""
    lines: set[int] = set()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != path:
            return None
        lines.add(frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return sorted(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the index of an installed library and write it into a folder."""
    parser = argparse.ArgumentParser(description="Make the index of an installed library.")
    parser.add_argument("name", help="name of the installed distribution")
    parser.add_argument("--licence", required=True, help="its licence, as SPDX names it")
    parser.add_argument("--split", default="train", help="split that gets its tasks")
    parser.add_argument("--files", nargs="*", help="files to make tasks of; all if none is named")
    parser.add_argument("--into", type=Path, default=Path(), help="folder for the index")
    options = parser.parse_args(arguments)
    distribution = metadata.distribution(options.name)
    sources = sources_of(distribution)
    with tempfile.TemporaryDirectory(prefix="agentenv-build-") as folder:
        files = build(sources, options.files or sorted(sources), Path(folder))
    index = {
        "name": options.name,
        "version": distribution.version,
        "licence": options.licence,
        "split": options.split,
        "files": files,
    }
    options.into.mkdir(parents=True, exist_ok=True)
    (options.into / f"{options.name}.json").write_text(written(index), encoding="utf-8")
    sys.stdout.write(f"{options.name}: {sum(len(part['faults']) for part in files.values())} tasks\n")


def written(index: Mapping[str, Any]) -> str:
    """Return an index as JSON with a line for each mistake, so that changes of it can be read."""

    def on_one_line(found: re.Match[str]) -> str:
        return f"[{' '.join(found[1].split())}]"

    return re.sub(r"\[\s+([^\[\]]*?)\s+\]", on_one_line, json.dumps(index, indent=1)) + "\n"


if __name__ == "__main__":
    main()
