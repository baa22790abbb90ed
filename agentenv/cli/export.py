"""`agentenv export`: a run's episodes in the shapes of others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from agentenv.cli.options import RunsDirOption

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)
FORMATS = ("openai", "sft", "atif", "parquet")


@app.command()
def run(
    name: str = typer.Argument(..., metavar="RUN", help="Run to export."),
    shape: str = typer.Option("openai", "--as", help="openai, sft, atif or parquet."),
    output: str = typer.Option("", "--output", help="File or directory; in the run if empty."),
    min_reward: float = typer.Option(1.0, "--min-reward", help="Least reward of an episode for sft."),
    runs_dir: str = RunsDirOption,
) -> None:
    """Write a run's episodes as OpenAI messages, SFT rows, ATIF documents or a parquet file."""
    from agentenv.errors import UsageError
    from agentenv.interop.atif import to_atif
    from agentenv.interop.chatlogs import to_openai, to_sft
    from agentenv.store import find_run
    from agentenv.store.parquet import write_parquet

    if shape not in FORMATS:
        raise UsageError(f"there is no format {shape!r}; the formats are {', '.join(FORMATS)}")
    source = find_run(name, runs_dir)
    if shape == "atif":
        target = Path(output or source.path / "atif")
        documents = (
            (f"{place:05}.json", [to_atif(one, model=source.info.model)]) for place, one in enumerate(source)
        )
        count = sum(_write(target / file, document) for file, document in documents)
    elif shape == "parquet":
        target = Path(output or source.path / "trajectories.parquet")
        count = write_parquet(source, target)
    else:
        target = Path(output or source.path / f"{shape}.jsonl")
        rows = to_openai(source) if shape == "openai" else to_sft(source, min_reward=min_reward)
        count = _write(target, rows)
    print(f"{target}  {count} episodes")


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    from agentenv.errors import StoreError
    from agentenv.store.codec import dumps

    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(json.loads(dumps(row)), ensure_ascii=True) + "\n")
                count += 1
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}; name another with --output"
        ) from error
    return count
