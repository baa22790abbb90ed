"""Task sets: immutable tasks with stable ids and splits, in an order that a seed determines.

A task set is made from one of these sources, or from a mapping of split names to sources:

- an iterable of mappings, or a function without arguments that returns one and is called when first
  needed; a generator that yields 10,000 rows or more counts as endless;
- a function of one argument, `seed`; the set is endless, and task `n` is `function(n)`;
- the path of a file, as `pathlib.Path` or text ending in `.jsonl`, `.json`, `.csv` or `.parquet`;
- a Hugging Face dataset object, or text such as `hf:owner/name` or `hf:owner/name:split`;
- a table of pandas, polars or pyarrow.

A row that cannot be played may be a `TaskError` that says why: it is left out and named.

The id of a row is its field `id` if it has one, else a digest of its content, so that the id does not
change when rows are reordered or filtered. A suffix distinguishes rows with the same content.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeAlias, cast

from agentenv.core.episode_env import Task, TaskFields, derive_seed, digest
from agentenv.core.errors import TaskError, did_you_mean
from agentenv.core.fields import wanted_by
from agentenv.core.imports import import_object
from agentenv.core.messages import JsonValue
from agentenv.core.visible import logger
from agentenv.envs.task_files import is_name_of_rows, named_rows, table_rows, why_no_rows

__all__ = ["TaskSet", "TaskSource", "held_out_seeds", "task_from", "train_seeds"]

TaskSource: TypeAlias = object
"""Anything that `TaskSet.of` takes; the module's docstring lists the kinds."""

_log = logger(__name__)
HELD_OUT = ("eval", "test", "validation", "val")
"""Names of held-out splits, the first choice first."""
_NAMED = 5
"""Rows left out that are named one by one."""
_STREAM_ROWS = 10_000
"""A generator that yields this many rows counts as endless; drawing and shuffling use only these rows."""

_ENDLESS_SPAN = 2**31
"""Drawing and shuffling a function of a seed use seeds below this number."""


class TaskSet:
    """Tasks of one or more splits, read when they are first needed.

    Iteration, `len`, indexing and drawing use the chosen split: the one chosen with `split`, else `train`
    if there is one, else the first.
    """

    def __init__(self, sources: Mapping[str, TaskSource], *, chosen: str | None = None) -> None:
        if not sources:
            raise TaskError("a task set needs at least one split")
        self._sources = dict(sources)
        self._chosen = chosen or ("train" if "train" in sources else next(iter(sources)))
        self._rows: list[Task] | None = None
        self._rest: Iterator[Task] | None = None
        self._others: dict[str, TaskSet] = {}
        self.left_out: list[TaskError] = []
        """Why rows of the chosen split, of those that were read, cannot be played."""

    @classmethod
    def of(cls, source: TaskSource) -> TaskSet:
        """Make a task set from a source; a task set is returned unchanged.

        Raises:
            TaskError: The source is of an unknown kind.
        """
        if isinstance(source, TaskSet):
            return source
        if isinstance(source, Mapping):
            splits = cast("Mapping[str, TaskSource]", source)
            for name, part in splits.items():
                _check(part, f"split {name!r}")
            return cls(splits)
        _check(source, "tasks")
        return cls({"train": source})

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self._sources)

    @property
    def split_name(self) -> str:
        """Name of the chosen split."""
        return self._chosen

    @property
    def held_out(self) -> str:
        """Name of the held-out split, which evaluations play; empty if there is none."""
        return next((name for name in HELD_OUT if name in self._sources), "")

    def split(self, name: str) -> TaskSet:
        """Return the same set with another split chosen.

        Raises:
            TaskError: There is no such split.
        """
        if name not in self._sources:
            known = list(self._sources)
            meant = did_you_mean(name, known)
            raise TaskError(
                f"there is no split {name!r}", remedy=f"{meant} there are: {', '.join(known)}".lstrip()
            )
        if name == self._chosen:
            return self
        return self._others.setdefault(name, TaskSet(self._sources, chosen=name))

    @property
    def is_read(self) -> bool:
        """True if every row of the chosen split was read; a generator is read as far as it is needed."""
        return self._rows is not None and self._rest is None

    @property
    def endless(self) -> bool:
        """True if the chosen split is a function of a seed, or a generator with no known end."""
        return self._by_seed is not None or self._read()[1]

    @property
    def num_tasks(self) -> int | None:
        """Number of tasks in the chosen split; None if it is endless."""
        return None if self.endless else len(self)

    def __len__(self) -> int:
        if self.endless:
            raise TypeError("these tasks have no known end, so they have no length; use take(n)")
        return len(self._read()[0])

    def __iter__(self) -> Iterator[Task]:
        make = self._by_seed
        if make is not None:
            return (_seeded(make, number) for number in count())
        return self._stream()

    def __getitem__(self, key: int | str) -> Task:
        """Return a task by its index or by its id.

        Raises:
            TaskError: No task has this id.
            IndexError: There are not that many tasks.
        """
        if self._by_seed is not None:
            return _seeded(self._by_seed, key if isinstance(key, int) else _seed_in(key))
        rows, _ = self._read()
        if isinstance(key, int):
            return rows[key]
        for task in rows:
            if task.id == key:
                return task
        raise TaskError(f"there is no task {key!r} in split {self._chosen!r}, which has {len(rows)} tasks")

    def take(self, number: int) -> list[Task]:
        """Return the first `number` tasks, or all if there are fewer."""
        return list(islice(iter(self), number))

    def sample(self, seed: int) -> Task:
        """Draw one task; the same seed draws the same task.

        Raises:
            TaskError: There are no tasks.
        """
        drawn = derive_seed("task", seed)
        if self._by_seed is not None:
            return self[drawn % _ENDLESS_SPAN]
        rows, _ = self._read()
        if not rows:
            raise TaskError(f"split {self._chosen!r} has no tasks")
        # More rows of a generator may have been read by now; the draw must not depend on how many.
        return rows[drawn % min(len(rows), _STREAM_ROWS if self.endless else len(rows))]

    @property
    def num_shuffled(self) -> int | None:
        """Number of tasks that `shuffle` yields; None if it yields tasks without end."""
        if self._by_seed is not None:
            return None
        rows, more = self._read()
        return min(len(rows), _STREAM_ROWS) if more else len(rows)

    def shuffle(self, seed: int, *, start: int = 0) -> Iterator[Task]:
        """Yield the tasks in an order that the seed determines; ids do not change.

        A finite set yields each task once. A function of a seed yields tasks without end, whose seeds are
        drawn from this one. From an endless generator the first 10,000 rows are shuffled.

        Args:
            seed: seed of the order.
            start: number of tasks to skip; they are not made.
        """
        if self._by_seed is not None:
            return (self[derive_seed("shuffle", seed, n) % _ENDLESS_SPAN] for n in count(start))
        rows, more = self._read()
        order = rows[:_STREAM_ROWS] if more else list(rows)
        random.Random(seed).shuffle(order)
        return islice(order, start, None)

    @property
    def _by_seed(self) -> Callable[[int], Mapping[str, object]] | None:
        source = self._sources[self._chosen]
        seeded = callable(source) and len(wanted_by(source).required) == 1
        return cast("Callable[[int], Mapping[str, object]]", source) if seeded else None

    def _open(self) -> list[Task]:
        """Return the rows that were read so far; of all sources but generators those are all."""
        if self._rows is not None:
            return self._rows
        where = f"split {self._chosen!r}" if len(self._sources) > 1 else "tasks"
        rows, open_ended = _rows_of(self._sources[self._chosen], where)
        read = self._rows = []
        self._rest = _with_ids(self._played(rows), where)
        self._read_on(0 if open_ended else None)
        return read

    def _read_on(self, number: int | None) -> None:
        """Read so many more rows, or all. After an error nothing counts as read, so it is raised again."""
        assert self._rows is not None
        assert self._rest is not None
        try:
            more = list(islice(self._rest, number))
        except BaseException:
            self._rows = self._rest = None
            raise
        self._rows += more
        if number is None or len(more) < number:
            self._rest = None

    def _played(self, rows: Iterable[object]) -> Iterator[object]:
        """Yield the rows without those in whose place an error stands, which are left out and named."""
        for row in rows:
            if not isinstance(row, TaskError):
                yield row
                continue
            self.left_out.append(row)
            if len(self.left_out) <= _NAMED:
                _log.warning("left out: %s%s", row, "; more are counted" * (len(self.left_out) == _NAMED))

    def _read(self) -> tuple[list[Task], bool]:
        """Return the rows read so far, at least the first 10,000, and whether there are more."""
        rows = self._open()
        if self._rest is not None and len(rows) < _STREAM_ROWS:
            self._read_on(_STREAM_ROWS - len(rows))
        return rows, self._rest is not None

    def _stream(self) -> Iterator[Task]:
        rows, index = self._open(), 0
        while True:
            # Other iterators may have appended rows in the meantime: `rows` is shared, `index` is not.
            while index < len(rows):
                yield rows[index]
                index += 1
            if self._rest is None:
                return
            self._read_on(1)

    def record(self, *, where: str = "tasks") -> dict[str, JsonValue]:
        """Return the sources of the tasks as JSON values, for `from_record`.

        Raises:
            TaskError: A split can neither be imported by name nor written as JSON.
        """
        return {
            "chosen": self._chosen,
            "splits": {name: _source_record(source, where) for name, source in self._sources.items()},
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TaskSet:
        """Make a task set from the result of `record`."""
        sources = {name: _source_from(split) for name, split in record["splits"].items()}
        return cls(sources, chosen=record["chosen"])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TaskSet):
            return NotImplemented
        if self._sources == other._sources and self._chosen == other._chosen:
            return True
        try:
            return self.record() == other.record()
        except TaskError:
            return False

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        size = "not read" if self._rows is None else str(len(self._rows))
        return f"TaskSet(split={self._chosen!r}, tasks={size}, splits={list(self._sources)})"


def train_seeds(seed: int) -> dict[str, object]:
    """Return the training task of a seed; training tasks use even seeds."""
    return {"seed": 2 * seed}


def held_out_seeds(seed: int) -> dict[str, object]:
    """Return the held-out task of a seed; held-out tasks use odd seeds."""
    return {"seed": 2 * seed + 1}


def task_from(given: object, source: TaskSource | None, seed: int) -> Mapping[str, object]:
    """Return the fields of the task `given`; if it is None, draw a task from the source by the seed.

    Raises:
        TaskError: `given` is not a task.
    """
    if isinstance(given, Task):
        return given.data
    if isinstance(given, Mapping):
        return cast("Mapping[str, object]", given)
    if given is not None:
        raise TaskError(f"options['task'] is {given!r:.200}", remedy="a task is a mapping of field to value")
    return {} if source is None else TaskSet.of(source).sample(seed).data


def _check(source: TaskSource, where: str) -> None:
    """Raise at once if the source can never become tasks."""
    if isinstance(source, (str, Path)):
        name = str(source)
        if not is_name_of_rows(name):
            told = f"{where}: {name!r} is neither the path of a .jsonl, .json, .csv or .parquet file nor "
            raise TaskError(f"{told}hf:owner/name", remedy=why_no_rows(Path(name)))
        return
    if callable(source):
        wanted = wanted_by(source)
        if len(wanted.required) > 1:
            raise TaskError(
                f"{where}: the function has the parameters {wanted.required}",
                remedy="a function that makes tasks takes no arguments, or one seed",
            )
        return
    # A table of pyarrow is not iterable.
    if not isinstance(source, Iterable) and not hasattr(source, "to_pylist"):
        raise TaskError(
            f"{where}: {source!r:.200} cannot be read as tasks",
            remedy="pass an iterable of mappings, for example",
        )


def _source_record(source: TaskSource, where: str) -> dict[str, JsonValue]:
    if isinstance(source, (str, Path)):
        return {"name": str(source)}
    if isinstance(source, partial) and not source.keywords:
        return {**_source_record(source.func, where), "arguments": _json([*source.args], where)}
    if callable(source):
        name = f"{getattr(source, '__module__', '')}:{getattr(source, '__qualname__', '')}"
        if "<" in name or name.startswith(":") or name.endswith(":"):
            raise TaskError(
                f"{where}: the tasks come from {source!r:.200}, which cannot be imported by name",
                remedy="use a function at the top level of a module",
            )
        return {"function": name}
    if not isinstance(source, Sequence):
        raise TaskError(
            f"{where}: tasks from a {type(source).__name__} cannot be written as JSON",
            remedy="pass a function that returns them",
        )
    return {"rows": _json([dict(row) for row in source], where)}


def _json(value: object, where: str) -> JsonValue:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TaskError(f"{where}: the tasks cannot be written as JSON: {error}") from error


def _source_from(record: Mapping[str, Any]) -> TaskSource:
    if "function" not in record:
        return record["name"] if "name" in record else record["rows"]
    function = import_object(str(record["function"]), TaskError, where="function of the tasks")
    return partial(function, *record["arguments"]) if "arguments" in record else function


def _rows_of(source: TaskSource, where: str) -> tuple[Iterable[object], bool]:
    """Return the rows of a source, and whether they may be endless."""
    if isinstance(source, (str, Path)):
        return named_rows(str(source)), False
    if (table := table_rows(source)) is not None:
        return table, False
    rows = source() if callable(source) else source
    if inspect.isawaitable(rows) or not isinstance(rows, Iterable):
        raise TaskError(f"{where}: the function returned {rows!r:.200}, not an iterable of mappings")
    return cast("Iterable[object]", rows), isinstance(rows, Iterator)


def _with_ids(rows: Iterable[object], where: str) -> Iterator[Task]:
    seen: dict[str, int] = {}
    named_ids: set[str] = set()
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise TaskError(
                f"{where}, row {number + 1} is {row!r:.200}", remedy="a task is a mapping of field to value"
            )
        fields = cast("Mapping[str, object]", row)
        try:
            "".join(fields)  # the fastest way to learn that all names are text
        except TypeError:
            name = next(name for name in cast("Mapping[object, object]", row) if not isinstance(name, str))
            told = f"{where}, row {number + 1} has the field name {name!r}"
            raise TaskError(told, remedy="names are text") from None
        named = fields.get("id")
        if named is not None:
            if str(named) in named_ids:
                raise TaskError(f"{where}, row {number + 1}: another row also has the id {str(named)!r}")
            named_ids.add(str(named))
            yield _task(str(named), fields)
            continue
        content = digest(fields, number)
        seen[content] = seen.get(content, 0) + 1
        yield _task(content if seen[content] == 1 else f"{content}-{seen[content]}", fields, number)


def _task(id: str, fields: Mapping[str, object], row: int | None = None) -> Task:
    return Task(id, TaskFields(id, fields, row))


def _seeded(make: Callable[[int], Mapping[str, object]], seed: int) -> Task:
    fields = make(seed)
    if not isinstance(fields, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TaskError(
            f"task of seed {seed} is {fields!r:.200}", remedy="a task is a mapping of field to value"
        )
    return _task(f"seed-{seed}", fields)


def _seed_in(id: str) -> int:
    digits = id.removeprefix("seed-")
    if not digits.isdigit():
        raise TaskError(
            f"there is no task {id!r}",
            remedy="tasks that a function of a seed makes have the ids seed-0, seed-1, ...",
        )
    return int(digits)
