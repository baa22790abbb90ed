"""Write a run's episodes to a parquet file, as a copy for tables and queries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

from agentenv.core import DependencyMissing, StoreError, TokenSequence, Trajectory
from agentenv.runs.store import dumps

__all__ = ["write_parquet"]

ROWS_AT_ONCE = 64


def write_parquet(trajectories: Iterable[Trajectory], path: Path) -> int:
    """Write one row for each episode and return the number of rows.

    Raises:
        DependencyMissing: pyarrow is not installed.
        StoreError: The file cannot be written; no partial file is left behind.
    """
    if find_spec("pyarrow") is None:
        raise DependencyMissing.of("pyarrow", "parquet", purpose="writing parquet files")
    import pyarrow as pa
    from pyarrow import parquet

    schema: Any = _schema(pa)
    draft = path.with_name(f".{path.name}.partial")
    count = 0
    rows = map(_row, trajectories)
    try:
        with parquet.ParquetWriter(str(draft), schema, compression="zstd") as writer:
            for batch in _batches(rows):
                writer.write_table(_table(batch, schema))
                count += len(batch)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
    except Exception as error:
        # pyarrow refuses values that do not fit the columns, such as a seed below 0.
        draft.unlink(missing_ok=True)
        raise StoreError(
            f"cannot write {path}, because a value does not fit its table: {error}",
            remedy="the episodes are complete in trajectories.jsonl",
        ) from error
    return count


def _batches(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while batch := list(islice(rows, ROWS_AT_ONCE)):
        yield batch


def _table(rows: list[dict[str, Any]], schema: Any) -> Any:
    """Return the rows as a table; they pass through JSON, because Python objects would import pandas."""
    from pyarrow import json

    data = "\n".join(map(dumps, rows)).encode()
    whole = json.ReadOptions(use_threads=False, block_size=len(data) + 1)
    table = json.read_json(BytesIO(data), whole, json.ParseOptions(explicit_schema=schema))
    return table.select(schema.names)


def _schema(pa: Any) -> Any:
    return pa.schema(
        [
            ("env_id", pa.string()),
            ("task_id", pa.string()),
            ("group_id", pa.string()),
            ("member", pa.int32()),
            ("seed", pa.uint64()),
            ("stop_reason", pa.string()),
            ("reward", pa.float64()),
            ("num_turns", pa.int32()),
            ("token_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.bool_())),
            ("logprobs", pa.list_(pa.float32())),
            ("supports", pa.list_(pa.list_(pa.int32()))),
            ("rewards", pa.string()),
            ("messages", pa.string()),
            ("task", pa.string()),
            ("error", pa.string()),
        ]
    )


def _row(trajectory: Trajectory) -> dict[str, Any]:
    sequence = trajectory.sequences[-1] if trajectory.sequences else None
    return {
        "env_id": _utf8(str(trajectory.env_id)),
        "task_id": _utf8(str(trajectory.task_id)),
        "group_id": _utf8(str(trajectory.group_id)),
        "member": int(trajectory.member),
        "seed": trajectory.seed,
        "stop_reason": trajectory.stop_reason.value,
        "reward": trajectory.reward,
        "num_turns": len(trajectory.turns),
        "token_ids": list(map(int, sequence.token_ids)) if sequence else [],
        "loss_mask": sequence.loss_mask if sequence else [],
        "logprobs": sequence.logprobs if sequence else [],
        "supports": _supports(sequence) if sequence else None,
        "rewards": dumps(dict(trajectory.rewards)),
        "messages": dumps(list(trajectory.messages)),
        "task": dumps(dict(trajectory.task)),
        "error": _utf8(trajectory.error.message) if trajectory.error else None,
    }


def _supports(sequence: TokenSequence) -> list[list[int]] | None:
    """Return what each token was sampled from, empty for tokens of a whole distribution; None if all are."""
    if all(span.supports is None for span in sequence.spans):
        return None
    kept = [span.supports.tolist() if span.supports else [[]] * len(span) for span in sequence.spans]
    return [support for span in kept for support in span]


def _utf8(text: str) -> str:
    """Return text that a table can hold: an invalid surrogate becomes a question mark."""
    return text.encode(errors="replace").decode()
