"""Write a run. Each finished episode is appended at once, so that a full disk loses no earlier episode."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentenv.core.errors import InfrastructureError, StoreError, UsageError
from agentenv.core.files import make_directory, open_regular, write_regular
from agentenv.core.trajectory import StopReason, Trajectory
from agentenv.runs.store.codec import dumps
from agentenv.runs.store.images import IMAGES, SETTINGS, SHOWN, settings_of, take_out
from agentenv.runs.store.index import (
    EPISODES,
    INDEX,
    METRICS,
    NOTES,
    NOTES_OF_TOKENS,
    SERVERS,
    WORKERS,
    end_of_whole_lines,
    latest,
    read_index,
)
from agentenv.runs.store.locking import lock, unlock
from agentenv.runs.store.reader import Run
from agentenv.runs.store.runinfo import SCHEMA_VERSION, RunInfo, RunStatus, write_text_atomically
from agentenv.runs.store.summary import Encoded, EpisodeKey, EpisodeSummary, encode, index_line
from agentenv.runs.store.trust import signed
from agentenv.runs.store.vocabulary import TokenTexts

__all__ = ["RunWriter"]


class RunWriter:
    """Writes a run directory, and is the only one to do so.

    Make a writer with `create` or `resume`, and use it as a context manager.
    """

    # Invariant: `_ends[name]` is the size of each open file, and every file ends with a complete line.

    def __init__(self, directory: Path, info: RunInfo) -> None:
        self.path = directory
        self.info = info
        self._lock = lock(directory)
        self._closed = self._is_new = False
        self._texts: TokenTexts | None = None
        self._files: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._summaries: list[EpisodeSummary] = []
        self._image_settings: dict[str, Any] = {}

    @classmethod
    def create(
        cls, name: str, *, kind: str = "eval", runs_dir: str | Path = "runs", run_id: str = "", **values: Any
    ) -> Self:
        """Make a new run directory in `runs_dir` and return its writer.

        Args:
            name: an environment id or another name; its last part becomes part of the run's id.
            kind: `eval`, `train`, `branch` or `import`.
            runs_dir: the directory that contains the runs.
            run_id: name of the new directory; if empty, it is made from the time, `name` and the model.
            values: further fields of `RunInfo`.

        Raises:
            StoreError: The directory cannot be made or written.
            UsageError: `run_id` is not the name of one directory.
        """
        if run_id and (run_id in {".", ".."} or set(run_id) & set("/\\\0")):
            raise UsageError(
                f"the run id {run_id!r} is not the name of one directory",
                remedy="choose its place with runs_dir=",
            )
        directory = _new_directory(
            Path(runs_dir), run_id or _default_id(name, values.get("model") or ""), exact=bool(run_id)
        )
        info = signed(RunInfo.start(directory.name, kind, **values))
        writer = cls(directory, info)
        writer._is_new = True
        try:
            info.write(directory)
            writer._open()
        except BaseException:
            writer._release()
            raise
        return writer

    @classmethod
    def resume(cls, directory: str | Path) -> Self:
        """Open an existing run to continue it; an incomplete last line is removed.

        Raises:
            StoreError: The directory is not a run, another process writes it, or it cannot be written.
        """
        path = Path(directory)
        writer = cls(path, RunInfo.read(path))
        try:
            writer._recover()
        except BaseException:
            writer._release()
            raise
        return writer

    @property
    def id(self) -> str:
        """The run's id."""
        return self.path.resolve().name

    @property
    def summaries(self) -> list[EpisodeSummary]:
        """One summary for each episode that has been written."""
        return latest(self._summaries)

    @property
    def finished(self) -> set[EpisodeKey]:
        """Keys of the episodes that need not be played again; aborted episodes are not among them."""
        return {summary.key for summary in self.summaries if summary.stop_reason is not StopReason.ABORTED}

    def append(self, trajectory: Trajectory, encoded: Encoded | None = None) -> EpisodeSummary:
        """Write one finished episode and return its summary.

        Args:
            trajectory: the episode.
            encoded: what `encode` returned for it, if another process has called it already.

        Raises:
            StoreError: The disk is full or the directory is gone; the earlier episodes are intact.
        """
        self._append_texts(trajectory)
        offset = self._ends.get(EPISODES, 0)
        encoded = encode(trajectory, offset=offset) if encoded is None else encoded
        line = encoded.line
        if SHOWN in line:
            line = take_out(line, self._keep_image)
        summary = replace(encoded.summary, offset=offset, size=len(line))
        self._append(EPISODES, line)
        self._summaries.append(summary)
        self._append(INDEX, index_line(summary))
        return summary

    def log_workers(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Append one line for each row to `workers.jsonl`: how the driver and the workers are doing.

        Raises:
            StoreError: The file cannot be written.
        """
        self._append(WORKERS, b"".join(dumps(dict(row)).encode() + b"\n" for row in rows))

    def log_servers(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Append one line for each row to `servers.jsonl`: how the engine's servers are doing.

        Raises:
            StoreError: The file cannot be written.
        """
        self._append(SERVERS, b"".join(dumps(dict(row)).encode() + b"\n" for row in rows))

    def annotate(self, trajectory: Trajectory, **values: object) -> None:
        """Record what a trainer computed for an episode: `step`, `advantage`, `entropy`, `new_logprobs`.

        A list has one number for each token of the episode's sequences, one sequence after the other. Lists
        are stored in a file of their own, so that the single values of a long training are read quickly.

        Raises:
            StoreError: The file cannot be written.
        """
        note = {name: value for name, value in values.items() if not isinstance(value, list)}
        arrays = {name: value for name, value in values.items() if isinstance(value, list)}
        if arrays:
            line = dumps(arrays).encode() + b"\n"
            self._append(NOTES_OF_TOKENS, line)
            note["tokens"] = [self._ends[NOTES_OF_TOKENS] - len(line), len(line)]
        note["episode"] = f"{trajectory.group_id}#{trajectory.member}"
        self._append(NOTES, dumps(note).encode() + b"\n")

    def keep_texts(self, backend: Any, images: Mapping[str, Any] | None = None) -> None:
        """Write the text of each token id before the first episode that has it.

        A run can then be viewed without its tokenizer even if its process is killed. `vocab.jsonl` holds
        the texts while the run is written, and closing the run moves them to `vocab.json`.

        Args:
            backend: a `tokenizers.Tokenizer`.
            images: settings of the model's processor, which are written beside the first image.

        Raises:
            UsageError: The run has images that were prepared with other settings.
        """
        self._image_settings = now = dict(images or {})
        if now and (recorded := settings_of(self.path)) and recorded != now:
            raise UsageError(
                f"the images of run {self.id} were made with {recorded}, and the model's settings are {now}",
                remedy="restore the model's preprocessor_config.json, or begin a new run",
            )
        self._gather_texts()
        self._texts = TokenTexts(backend, Run(self.path).vocabulary())

    def write_vocabulary(self, vocabulary: Mapping[int, str]) -> None:
        """Write the text of token ids, with one character for each byte, so that viewing needs no tokenizer.

        Raises:
            StoreError: The file cannot be written.
        """
        write_text_atomically(
            self.path / "vocab.json", dumps({str(key): vocabulary[key] for key in sorted(vocabulary)})
        )

    def expect(self, episodes: int) -> None:
        """Record how many episodes the finished run will have.

        Raises:
            StoreError: The file cannot be written.
        """
        self.info = replace(self.info, expected_episodes=episodes)
        self.info.write(self.path)

    def close(self, status: RunStatus = RunStatus.FINISHED, note: str = "") -> None:
        """Flush the files to disk, record how the run ended, and release the lock.

        Closing a closed writer does nothing.

        Raises:
            StoreError: The end of the run cannot be recorded; its episodes are intact.
        """
        if self._closed:
            return
        try:
            for handle in self._files.values():
                os.fsync(handle)
            self.info = self.info.ended(status, note)
            self.info.write(self.path)
            if self._texts is not None:
                self._gather_texts()
        except OSError as error:
            raise StoreError(f"cannot close run {self.path}: {error.strerror or error}") from error
        finally:
            self._release()

    def discard(self) -> None:
        """Remove a new run that could not begin; one that is resumed stays as it is."""
        if self._is_new and not self._summaries:
            self._release()
            shutil.rmtree(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if isinstance(error, InfrastructureError) and error.remedy:
            named = self.id if self.path.parent == Path("runs") else self.path
            error.remedy += f"; then continue with: agentenv {self.info.kind} --resume {named}"
        stopped = not isinstance(error, Exception)
        status = RunStatus.INTERRUPTED if stopped else RunStatus.FAILED
        try:
            self.close(status, "" if stopped else f"{type(error).__name__}: {error}")
        except StoreError:
            return

    def _keep_image(self, name: str, data: bytes) -> None:
        """Write an image of the run, unless it is there.

        Raises:
            StoreError: The file cannot be written.
        """
        path = self.path / IMAGES / name
        if path.exists():
            return
        try:
            make_directory(path.parent)
            if not (path.parent / SETTINGS).exists():
                write_text_atomically(path.parent / SETTINGS, dumps(self._image_settings))
            part = path.with_suffix(".part")
            write_regular(part, data)
            part.replace(path)  # so that a file of this name is always whole
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror or error}") from error

    def _append_texts(self, trajectory: Trajectory) -> None:
        if self._texts is None:
            return
        spans = [span for sequence in trajectory.sequences for span in sequence.spans]
        texts = self._texts.fresh(span.token_ids for span in spans)
        if texts:
            self._append(
                "vocab.jsonl", dumps({str(key): text for key, text in texts.items()}).encode() + b"\n"
            )

    def _gather_texts(self) -> None:
        """Move all texts to `vocab.json`, which also drops a line that a killed process left incomplete."""
        lines = self.path / "vocab.jsonl"
        if lines.exists():
            self.write_vocabulary(Run(self.path).vocabulary())
            lines.unlink()

    def _release(self) -> None:
        self._closed = True
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()
        if self._lock >= 0:
            unlock(self._lock)
            self._lock = -1

    def _open(self) -> None:
        for name in (EPISODES, INDEX):
            self._handle(name)

    def _handle(self, name: str) -> int:
        if self._closed:
            raise StoreError(f"run {self.id} is closed", remedy="resume it to continue")
        if name not in self._files:
            path = self.path / name
            try:
                handle = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
                self._ends[name] = os.fstat(handle).st_size
            except OSError as error:
                raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
            self._files[name] = handle
        return self._files[name]

    def _append(self, name: str, data: bytes) -> None:
        """Append all of `data`, or leave the file as it was."""
        handle = self._handle(name)
        self._check_place(name, handle)
        start = self._ends[name]
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(handle, view) :]
        except OSError as error:
            os.ftruncate(handle, start)
            raise StoreError(
                f"cannot write {self.path / name}: {error.strerror or error}",
                remedy=f"{len(self._summaries)} finished episodes are kept: free some space,"
                f" then continue with --resume {self.id}",
            ) from error
        self._ends[name] = start + len(data)

    def _check_place(self, name: str, handle: int) -> None:
        """Check that an open file still has its name: what is written to a removed file is lost.

        Raises:
            StoreError: The file or its directory was removed, moved or replaced.
        """
        path = self.path / name
        try:
            there = os.path.samestat(os.stat(path), os.fstat(handle))  # noqa: PTH116 - of an open file, too
        except OSError:
            there = False
        if not there:
            raise StoreError(
                f"{path} was removed, moved or replaced while the run was written",
                remedy="start the run again, or put its directory back and continue it with --resume",
            )

    def _recover(self) -> None:
        index = read_index(self.path)
        episodes = self._handle(EPISODES)
        os.ftruncate(episodes, index.end)
        self._ends[EPISODES] = index.end
        self._summaries = index.summaries
        for name in (METRICS, NOTES, NOTES_OF_TOKENS, WORKERS, SERVERS):
            path = self.path / name
            if os.path.lexists(path):
                with os.fdopen(open_regular(path, os.O_RDWR), "r+b") as file:
                    file.truncate(end_of_whole_lines(path))
        self._handle(INDEX)
        if index.num_indexed < len(index.summaries) or index.num_indexed == 0:
            os.ftruncate(self._files[INDEX], 0)
            self._ends[INDEX] = 0
            self._append(INDEX, b"".join(map(index_line, index.summaries)))
        self.info = replace(
            self.info, status=RunStatus.RUNNING, note="", closed="", schema_version=SCHEMA_VERSION
        )
        self.info.write(self.path)


def _default_id(name: str, model: str) -> str:
    played = re.sub(r"-v\d+$", "", name.rpartition("/")[2].removesuffix(".py"))
    # The address of a server says nothing about its model.
    by = (
        ""
        if model.startswith(("http://", "https://"))
        else re.split(r"[/:]", model.partition("@")[0].rstrip("/"))[-1]
    )
    words = [word.lower() for part in (played, by) for word in re.findall(r"[A-Za-z0-9]+", part)[:3]]
    return "-".join([datetime.now().astimezone().strftime("%m%d-%H%M"), *words])


def _new_directory(root: Path, name: str, *, exact: bool) -> Path:
    for number in range(1, 1000):
        directory = root / (name if number == 1 else f"{name}-{number}")
        try:
            directory.mkdir(parents=True, exist_ok=False)
        except FileExistsError as error:
            if exact or not directory.is_dir():
                raise StoreError(
                    f"the run directory {directory} already exists",
                    remedy="choose another name, or continue the run with --resume",
                ) from error
            continue
        except OSError as error:
            raise StoreError(
                f"cannot make the run directory {directory}: {error.strerror}",
                remedy="choose another directory with --runs-dir",
            ) from error
        return directory
    raise StoreError(f"{root} already has 1000 runs called {name}", remedy="delete old runs from it")
