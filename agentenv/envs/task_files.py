"""Read the rows of tasks from files and from data sets of the Hugging Face Hub, one mapping at a time.

A cell of a CSV file is text; `agentenv.envs.declared` makes it what `start` declares.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from agentenv.core.errors import DependencyMissing, TaskError
from agentenv.core.files import json_lines, json_value, user_text

__all__ = ["is_name_of_rows", "named_rows", "table_rows", "why_no_rows"]


def is_name_of_rows(name: str) -> bool:
    """Return whether a text names a data set of the Hub, or a file of a kind that is read as tasks."""
    return name.startswith("hf:") or Path(name).suffix.lower() in _READERS


def named_rows(name: str) -> Iterable[object]:
    """Return the rows of a file, or of `hf:owner/name` or `hf:owner/name:split`.

    Raises:
        TaskError: The file cannot be read; the message has the line of what is wrong.
        DependencyMissing: The package that reads this kind of source is not installed.
    """
    if name.startswith("hf:"):
        return _hub(name)
    return _file(Path(name))


def table_rows(source: Any) -> list[object] | None:
    """Return the rows of a table of pandas, polars or pyarrow; None if the object is none."""
    if hasattr(source, "iterrows"):
        return source.astype(object).where(source.notna(), None).to_dict("records")
    read: Any = getattr(source, "to_dicts", None) or getattr(source, "to_pylist", None)
    return None if read is None else cast("list[object]", read())


def why_no_rows(path: Path) -> str:
    """Return what to do with a path of a kind that is not read as tasks."""
    if path.suffix in {".gz", ".zst", ".bz2", ".xz"}:
        return "unpack the file first"
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        return f"pass the data set itself: tasks=datasets.load_from_disk({str(path)!r})"
    if path.is_dir():
        return (
            "name a file in this directory, or the files of its splits: tasks={'train': FILE, 'test': FILE}"
        )
    return "convert the file to one of these kinds, or pass its rows: tasks=[{...}]"


def _file(path: Path) -> Iterator[object]:
    row: object = None
    try:
        for row in _READERS[path.suffix.lower()](path):
            yield row
    except OSError as error:
        remedy = f"a path begins in the working directory, {Path.cwd()}"
        problem = f"cannot read the tasks in {path}: {error.strerror or error}"
        raise TaskError(problem, remedy=remedy) from error
    if row is None:
        raise TaskError(f"{path} holds no tasks", remedy="write a row for each task")


def _json_lines(path: Path) -> Iterator[object]:
    return (value for _, value in json_lines(path, error=TaskError))


def _json(path: Path) -> Iterator[object]:
    text = user_text(path)
    try:
        rows = json_value(text, path, error=TaskError)
    except TaskError as error:
        if "Extra data" in error.message:  # what ends before the file does is a row of JSON lines
            error.remedy = (
                "a file with one object in each line is JSON lines: give its name the ending .jsonl"
            )
        raise
    if not isinstance(rows, list):
        raise TaskError(f"{path} holds {type(rows).__name__} and not a list of tasks", remedy="write [{...}]")
    yield from cast("list[object]", rows)


def _csv(path: Path) -> Iterator[object]:
    reader = csv.DictReader(io.StringIO(user_text(path), newline=""), strict=True)
    names = list(reader.fieldnames or [])
    if len(names) == 1 and (found := next((mark for mark in ";\t|" if mark in names[0]), "")):
        problem = f"{path} has a single column, {names[0]!r}; its cells seem to be separated by {found!r}"
        raise TaskError(problem, remedy="separate the cells by commas")
    if doubled := {name for name in names if names.count(name) > 1}:
        raise TaskError(f"{path} has several columns with the name {sorted(doubled)[0]!r}")
    try:
        for row in reader:
            if cast("Any", row).pop(None, None) is not None:
                problem = f"{path}, line {reader.line_num} has more than {len(names)} cells"
                raise TaskError(problem, remedy="put a cell that has a comma in quotation marks")
            yield row
    except csv.Error as error:
        raise TaskError(f"{path}, line {reader.line_num} is not CSV: {error}") from error


def _parquet(path: Path) -> Iterator[object]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DependencyMissing.of("pyarrow", "parquet", purpose=f"reading tasks from {path}") from error
    try:
        for batch in cast("Any", parquet).ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except ArrowException as error:
        remedy = "write the file again, as pyarrow.parquet.write_table does, or name it after what it is"
        raise TaskError(f"cannot read the tasks in {path}: {error}", remedy=remedy) from error


_READERS: dict[str, Callable[[Path], Iterator[object]]] = {
    ".csv": _csv,
    ".json": _json,
    ".jsonl": _json_lines,
    ".parquet": _parquet,
}


def _hub(name: str) -> Iterable[object]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        missing = f"tasks from {name} need the package datasets"
        raise DependencyMissing(missing, remedy="pip install datasets") from error
    owner_name, _, split = name.removeprefix("hf:").partition(":")
    try:
        return cast("Any", datasets).load_dataset(owner_name, split=split or "train")
    except Exception as error:  # the package raises errors of its own, of the network and of the Hub
        raise TaskError(f"cannot read the tasks in {name}: {error}") from error
