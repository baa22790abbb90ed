"""Read runs: list them, and load single episodes, also while another process writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from agentenv.core.errors import RunNotFound, StoreError, UsageError
from agentenv.core.files import read_regular
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.core.visible import one_line
from agentenv.runs.store.codec import decode_trajectory, loads
from agentenv.runs.store.index import (
    EPISODES,
    METRICS,
    NOTES,
    NOTES_OF_TOKENS,
    SERVERS,
    WORKERS,
    Index,
    latest,
    read_index,
    read_line,
    whole_lines,
)
from agentenv.runs.store.locking import is_locked
from agentenv.runs.store.runinfo import RunInfo, RunStatus
from agentenv.runs.store.summary import EpisodeSummary, with_played

__all__ = ["Run", "find_run", "list_runs"]


class Run:
    """A run directory that is only read. Opening it does not load the tokens of the episodes.

    Raises:
        StoreError: The directory is not a run, or a newer agentenv wrote it.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        self.info = RunInfo.read(self.path)

    @property
    def id(self) -> str:
        """The run's id, which is the current name of its directory."""
        return self.path.resolve().name

    @property
    def status(self) -> RunStatus:
        """Status of the run; a run whose process ended without closing it counts as interrupted."""
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
    def terms(self) -> tuple[str, ...]:
        """Terms of the run's mean, with how many episodes it lacks if it was broken off."""
        return with_played(self.info.terms, self.summaries, self.info.expected_episodes)

    @property
    def num_damaged(self) -> int:
        """Number of lines that could not be read as an episode."""
        return len(self._index.damaged)

    def __len__(self) -> int:
        return len(self.summaries)

    def __repr__(self) -> str:
        return one_line(self, str(self.path))

    def load(self, episode: int | EpisodeSummary) -> Trajectory:
        """Return one episode.

        Args:
            episode: the index of the episode in `summaries`, or its summary.


        Raises:
            IndexError: There is no such episode.
            StoreError: The line of the episode cannot be read.
        """
        summary = self.summaries[episode] if isinstance(episode, int) else episode
        data = read_line(self.path / EPISODES, summary.offset, summary.size)
        try:
            return decode_trajectory(data)
        except ValueError as error:
            raise StoreError(
                f"cannot read the episode at byte {summary.offset} of {self.path / EPISODES}: {error}"
            ) from error

    def __iter__(self) -> Iterator[Trajectory]:
        return map(self.load, self.summaries)

    def groups(self) -> Iterator[TrajectoryGroup]:
        """Yield the groups in the order of their first episodes; each group is sorted by member."""
        members: dict[tuple[str, str, str], list[EpisodeSummary]] = {}
        for summary in self.summaries:
            members.setdefault(summary.key[:3], []).append(summary)
        for group in members.values():
            group.sort(key=lambda summary: summary.member)
            yield TrajectoryGroup(tuple(map(self.load, group)))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`, without those that cannot be read."""
        return _json_lines(self.path / METRICS)

    def workers(self) -> list[dict[str, Any]]:
        """Return the latest line of `workers.jsonl` for the driver and each worker; none without workers."""
        latest = {str(row.get("worker")): row for row in _json_lines(self.path / WORKERS)}
        return list(latest.values())

    def servers(self) -> list[dict[str, Any]]:
        """Return the latest line of `servers.jsonl` for each server of the engine; none without servers."""
        latest = {str(row.get("server")): row for row in _json_lines(self.path / SERVERS)}
        return list(latest.values())

    @cached_property
    def _notes(self) -> dict[str, dict[str, Any]]:
        notes = _json_lines(self.path / NOTES)
        return {str(note["episode"]): note for note in notes if "episode" in note}

    def annotations(self) -> dict[str, dict[str, Any]]:
        """Return what a trainer recorded for each episode, by `group_id#member`, without per-token lists."""
        return self._notes

    def note(self, episode: EpisodeSummary) -> dict[str, Any]:
        """Return everything that a trainer recorded for an episode; empty if it recorded nothing."""
        note = dict(self._notes.get(f"{episode.group_id}#{episode.member}", {}))
        offset_and_size = note.pop("tokens", None)
        if isinstance(offset_and_size, list) and len(offset_and_size) == 2:
            with suppress(StoreError):
                note |= read_line(self.path / NOTES_OF_TOKENS, *offset_and_size)
        return note

    def role(self, episode: EpisodeSummary | Trajectory) -> str:
        """Return `demonstration` or `held-out` for such an episode of a training, else an empty text."""
        return str(self._notes.get(f"{episode.group_id}#{episode.member}", {}).get("role", ""))

    @property
    def results(self) -> list[EpisodeSummary]:
        """Summaries of what means are made of: without a training's demonstrations and held-out episodes."""
        return [summary for summary in self.summaries if not self.role(summary)]

    def vocabulary(self) -> dict[int, str]:
        """Return the text of the token ids that occur in the run, with one character for each byte.

        The result is empty if the run has no texts.
        """
        tables: list[Any] = list(_json_lines(self.path / "vocab.jsonl"))
        with suppress(OSError, ValueError):
            tables.append(loads(read_regular(self.path / "vocab.json")))
        return {
            int(key): str(text)
            for table in tables
            if isinstance(table, dict)
            for key, text in table.items()
            if key.isdecimal()
        }

    def decoder(self) -> Callable[[Sequence[int]], str]:
        """Return a function that returns the text of token ids, from the texts that the run stores.

        Raises:
            UsageError: The returned function raises this if the run has no text for an id.
        """
        texts = self.vocabulary()

        def decode(token_ids: Sequence[int]) -> str:
            missing = next((token for token in token_ids if token not in texts), None)
            if missing is not None:
                raise UsageError(
                    f"run {self.info.id} has no text for the token id {missing}",
                    remedy="name the directory of the tokenizer with --tokenizer",
                )
            pieces = "".join(texts[token] for token in token_ids)
            return pieces.encode("latin-1").decode(errors="replace")

        return decode

    def find(self, episode: str) -> EpisodeSummary:
        """Return the summary of an episode named by its index (`12`), `task/member` or `group#member`.

        Raises:
            RunNotFound: The run has no such episode.
        """
        text = episode.removeprefix("#")
        if text.isdecimal() and int(text) < len(self.summaries):
            return self.summaries[int(text)]
        for summary in self.summaries:
            names = (f"{summary.task_id}/{summary.member}", f"{summary.group_id}#{summary.member}")
            if text in names:
                return summary
        raise RunNotFound(
            f"run {self.id} has no episode {episode!r}",
            remedy=f"it has {len(self.summaries)} episodes: name one by its index from 0, or as task/member",
        )


def _json_lines(path: Path) -> list[dict[str, Any]]:
    objects: list[dict[str, Any]] = []
    try:
        for _, line in whole_lines(path, 0):
            try:
                value = loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                objects.append(value)
    except OSError:
        return objects
    return objects


def list_runs(
    runs_dir: str | Path = "runs", *, on_broken: Callable[[StoreError], None] | None = None
) -> list[Run]:
    """Return the runs in a directory, newest first; directories that are not runs are left out.

    Args:
        runs_dir: the directory that contains the runs.
        on_broken: called with the error of each run that cannot be read and is left out.
    """
    runs: list[Run] = []
    base = Path(runs_dir)
    if not base.is_dir():
        return runs
    for path in base.iterdir():
        try:
            if (path / "run.json").is_file():
                runs.append(Run(path))
        except OSError as error:  # also a `StoreError`, and a directory that may not be read
            if on_broken is not None:
                on_broken(error if isinstance(error, StoreError) else StoreError(f"{path}: {error}"))
    return sorted(runs, key=lambda run: (run.info.created, run.id), reverse=True)


def find_run(name: str | Path, runs_dir: str | Path = "runs") -> Run:
    """Return the run with this directory or id, or a unique part of its id; `last` is the newest run.

    Raises:
        RunNotFound: The name fits no run or more than one, or the directory is not a run.
        StoreError: The run cannot be read.
    """
    text = str(name)
    for path in (Path(text), Path(runs_dir) / text):
        if path.is_dir():
            return Run(path)
    runs = list_runs(runs_dir)
    if text == "last" and runs:
        return runs[0]
    matches = [run for run in runs if run.id.startswith(text)] or [run for run in runs if text in run.id]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(run.id for run in matches[:5])
        raise RunNotFound(f"{text!r} fits {len(matches)} runs: {names}", remedy="write more of the id")
    known = f"the newest is {runs[0].id}" if runs else f"there are no runs in {Path(runs_dir)}/"
    raise RunNotFound(f"there is no run {text!r}", remedy=known)
