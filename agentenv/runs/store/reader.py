"""Read runs: list them fast, load one episode in milliseconds, also while they are being written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from agentenv.core.errors import AlignmentError, StoreError
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.runs.store.codec import decode_trajectory
from agentenv.runs.store.index import (
    EPISODES,
    METRICS,
    NOTES,
    NOTES_OF_TOKENS,
    Index,
    latest,
    read_index,
    read_line,
    whole_lines,
)
from agentenv.runs.store.locking import is_locked
from agentenv.runs.store.runinfo import RunInfo, RunStatus
from agentenv.runs.store.summary import EpisodeSummary

__all__ = ["Run", "find_run", "list_runs"]


class Run:
    """A run directory, read only. Opening it does not read the episodes' tokens.

    Raises:
        StoreError: The directory is not a run, or of a newer layout.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        self.info = RunInfo.read(self.path)

    @property
    def id(self) -> str:
        """The run's id: the name of its directory, also after it was moved."""
        return self.path.resolve().name

    @property
    def status(self) -> RunStatus:
        """How far the run came; one whose process is gone without closing it was interrupted."""
        if self.info.status is RunStatus.RUNNING and not is_locked(self.path):
            return RunStatus.INTERRUPTED
        return self.info.status

    @cached_property
    def _index(self) -> Index:
        return read_index(self.path)

    @cached_property
    def summaries(self) -> list[EpisodeSummary]:
        """One summary for each finished episode, in the order of the file."""
        return latest(self._index.summaries)

    @property
    def num_damaged(self) -> int:
        """Lines that could not be read as an episode."""
        return len(self._index.damaged)

    def __len__(self) -> int:
        return len(self.summaries)

    def load(self, episode: int | EpisodeSummary) -> Trajectory:
        """Return one episode by its place or its summary.

        Raises:
            IndexError: There is no such episode.
            StoreError: Its line cannot be read.
        """
        summary = self.summaries[episode] if isinstance(episode, int) else episode
        data = read_line(self.path / EPISODES, summary.offset, summary.size)
        try:
            return decode_trajectory(data)
        except (AlignmentError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise StoreError(
                f"episode at byte {summary.offset} of {self.path / EPISODES}: {error}"
            ) from error

    def __iter__(self) -> Iterator[Trajectory]:
        return map(self.load, self.summaries)

    def groups(self) -> Iterator[TrajectoryGroup]:
        """Yield the groups in the order of their first episode, members in order."""
        members: dict[tuple[str, str, str], list[EpisodeSummary]] = {}
        for summary in self.summaries:
            members.setdefault(summary.key[:3], []).append(summary)
        for found in members.values():
            found.sort(key=lambda one: one.member)
            yield TrajectoryGroup(tuple(map(self.load, found)))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`; those that cannot be read are left out."""
        return _json_lines(self.path / METRICS)

    @cached_property
    def _notes(self) -> dict[str, dict[str, Any]]:
        notes = _json_lines(self.path / NOTES)
        return {str(one["episode"]): one for one in notes if "episode" in one}

    def annotations(self) -> dict[str, dict[str, Any]]:
        """Return what a trainer noted on episodes, by `group_id#member`, without the lists of tokens."""
        return self._notes

    def note(self, episode: EpisodeSummary) -> dict[str, Any]:
        """Return all that a trainer noted on an episode; nothing where it noted nothing."""
        note = dict(self._notes.get(f"{episode.group_id}#{episode.member}", {}))
        place = note.pop("tokens", None)
        if isinstance(place, list) and len(place) == 2:
            with suppress(StoreError):
                note |= read_line(self.path / NOTES_OF_TOKENS, *place)
        return note

    def vocabulary(self) -> dict[int, str]:
        """Return the text of the token ids that occur, each byte as one character; empty if unknown."""
        kept: list[Any] = list(_json_lines(self.path / "vocab.jsonl"))
        with suppress(OSError, ValueError):
            kept.append(json.loads((self.path / "vocab.json").read_text(encoding="utf-8")))
        return {int(key): str(text) for one in kept if isinstance(one, dict) for key, text in one.items()}

    def find(self, episode: str) -> EpisodeSummary:
        """Return the summary of an episode named by its place (`12`), `task/member` or `group#member`.

        Raises:
            StoreError: The run has no such episode.
        """
        text = episode.removeprefix("#")
        if text.isdecimal() and int(text) < len(self.summaries):
            return self.summaries[int(text)]
        for summary in self.summaries:
            names = (f"{summary.task_id}/{summary.member}", f"{summary.group_id}#{summary.member}")
            if text in names:
                return summary
        raise StoreError(
            f"run {self.id} has no episode {episode!r}",
            remedy=f"it has {len(self.summaries)}: name one by its place from 0, or as task/member",
        )


def _json_lines(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    try:
        for _, line in whole_lines(path, 0):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                found.append(value)
    except OSError:
        return found
    return found


def list_runs(
    root: str | Path = "runs", *, on_broken: Callable[[StoreError], None] | None = None
) -> list[Run]:
    """Return the runs under a directory, newest first; what is not a run is left out.

    Args:
        root: directory of all runs.
        on_broken: told of each run that is left out because it cannot be read.
    """
    found: list[Run] = []
    base = Path(root)
    if not base.is_dir():
        return found
    for path in base.iterdir():
        if (path / "run.json").is_file():
            try:
                found.append(Run(path))
            except StoreError as error:
                if on_broken is not None:
                    on_broken(error)
    return sorted(found, key=lambda run: (run.info.created, run.id), reverse=True)


def find_run(name: str | Path, root: str | Path = "runs") -> Run:
    """Return a run by its directory, its id, a unique beginning or part of its id, or `last`.

    Raises:
        StoreError: No run, or more than one, is meant.
    """
    text = str(name)
    for path in (Path(text), Path(root) / text):
        if path.is_dir():
            return Run(path)
    runs = list_runs(root)
    if text == "last" and runs:
        return runs[0]
    matches = [run for run in runs if run.id.startswith(text)] or [run for run in runs if text in run.id]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(run.id for run in matches[:5])
        raise StoreError(f"{text!r} means {len(matches)} runs: {names}", remedy="give more of the id")
    known = f"the newest is {runs[0].id}" if runs else f"there are no runs in {Path(root)}/"
    raise StoreError(f"no run {text!r}", remedy=known)
