"""The index of `trajectories.jsonl`, which is derived from it and brought up to date on every opening."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv.core.errors import StoreError
from agentenv.core.files import reading
from agentenv.runs.store.codec import decode_trajectory, loads
from agentenv.runs.store.images import put_back
from agentenv.runs.store.summary import EpisodeSummary, decode_summary, summarize

__all__ = [
    "EPISODES",
    "INDEX",
    "METRICS",
    "NOTES",
    "NOTES_OF_TOKENS",
    "SERVERS",
    "WORKERS",
    "Index",
    "end_of_whole_lines",
    "latest",
    "new_summaries",
    "read_index",
]

EPISODES = "trajectories.jsonl"
INDEX = "index.jsonl"
METRICS = "metrics.jsonl"
WORKERS = "workers.jsonl"
SERVERS = "servers.jsonl"
NOTES = "annotations.jsonl"
NOTES_OF_TOKENS = "token_annotations.jsonl"
MAX_LINE_BYTES = 512 << 20
"""Longest line that is read. A file with a longer one is no file of a run; a sparse one may never end."""


@dataclass(slots=True)
class Index:
    """The summaries of a run's episodes, in the order of the file."""

    # Invariant: `summaries[:num_indexed]` come from the index file, and `end` is 0 or follows a line break.

    summaries: list[EpisodeSummary] = field(default_factory=list[EpisodeSummary])
    end: int = 0
    """Offset of the first byte after the last complete line."""
    num_indexed: int = 0
    """Number of leading summaries that came from the index file; the others were made from the episodes."""
    damaged: list[int] = field(default_factory=list[int])
    """Offsets of complete lines that could not be read as an episode."""


def read_index(directory: Path) -> Index:
    """Return the summaries of a run; those that the index file lacks are made from the episodes.

    Raises:
        StoreError: The episodes cannot be read.
    """
    episodes = directory / EPISODES
    try:
        size = episodes.stat().st_size if episodes.is_file() else 0
        index = _from_file(directory / INDEX, episodes, size)
        if index.end < size:
            for offset, line in whole_lines(episodes, index.end):
                index.end = offset + len(line)
                try:
                    trajectory = decode_trajectory(loads(line))
                    index.summaries.append(summarize(trajectory, offset=offset, size=len(line)))
                except Exception:  # noqa: BLE001 - anything may stand in a line that somebody else wrote
                    index.damaged.append(offset)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot read {episodes}: {error.strerror or error}") from error
    return index


def new_summaries(directory: Path, offset: int) -> tuple[list[EpisodeSummary], int]:
    """Return what a running run added to its index after an offset, and the offset to go on from.

    Nothing is added if the index cannot be read just now.
    """
    summaries: list[EpisodeSummary] = []
    try:
        for start, line in whole_lines(directory / INDEX, offset):
            summaries.append(decode_summary(loads(line)))
            offset = start + len(line)
    except (StoreError, OSError, ValueError, TypeError, KeyError, AttributeError):
        return summaries, offset
    return summaries, offset


def _from_file(path: Path, episodes: Path, size: int) -> Index:
    """Return the part of the index file that agrees with the episodes; an empty index when in doubt."""
    index = Index()
    try:
        for _, line in whole_lines(path, 0):
            summary = decode_summary(loads(line))
            if summary.offset < index.end or summary.size < 1:
                return Index()
            if summary.offset + summary.size > size:
                break
            index.summaries.append(summary)
            index.end = summary.offset + summary.size
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Index()
    if index.summaries and not _ends_a_line(episodes, index.end):
        return Index()
    index.num_indexed = len(index.summaries)
    return index


def _ends_a_line(path: Path, end: int) -> bool:
    with reading(path) as file:
        file.seek(end - 1)
        return file.read(1) == b"\n"


def whole_lines(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of each line that ends with a line break.

    Raises:
        OSError: The path is no regular file, or cannot be read.
    """
    with reading(path) as file:
        file.seek(start)
        offset = start
        while line := file.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n"):
                return
            yield offset, line
            offset += len(line)


def end_of_whole_lines(path: Path) -> int:
    """Return the offset after the last complete line; only the end of the file is read.

    Raises:
        StoreError: The path is no regular file, or ends with more than any line has.
    """
    with reading(path) as file:
        end = last = file.seek(0, 2)
        while end:
            if last - end > MAX_LINE_BYTES:
                raise StoreError(
                    f"{path} ends with more than {MAX_LINE_BYTES:,} bytes that are no line of a run",
                    remedy="restore it from a copy, or start a new run",
                )
            start = max(0, end - 65_536)
            file.seek(start)
            index = file.read(end - start).rfind(b"\n")
            if index >= 0:
                return start + index + 1
            end = start
    return 0


def read_line(path: Path, offset: int, size: int) -> Any:
    """Return the JSON value of one line.

    Raises:
        StoreError: The line does not exist, or is not JSON.
    """
    try:
        with reading(path) as file:
            file.seek(offset)
            return loads(put_back(file.read(size), path.parent))
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read the episode at byte {offset} of {path}: {error}") from error


def latest(summaries: list[EpisodeSummary]) -> list[EpisodeSummary]:
    """Return one summary for each episode; of an episode that was played again, the latest."""
    return list({summary.key: summary for summary in summaries}.values())
