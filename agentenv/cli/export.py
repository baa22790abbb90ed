"""`agentenv export`: write a run's episodes in the formats of other tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agentenv.cli.options import RunsDirOption
from agentenv.core.errors import AgentEnvError, UsageError

if TYPE_CHECKING:
    from agentenv.render.tokenizer import ChatTokenizer

__all__ = ["run"]


def run(
    name: str = typer.Argument(..., metavar="RUN", help="Run to export."),
    shape: str = typer.Option(
        "openai",
        "--as",
        help="openai, sft, trl, verl, slime, prime-rl, inspect, atif, parquet or an installed format.",
    ),
    output: str = typer.Option("", "--output", help="File or directory; in the run's directory if empty."),
    min_reward: float = typer.Option(1.0, "--min-reward", help="For sft: least reward of an episode."),
    tokenizer: str = typer.Option(
        "", "--tokenizer", help="For slime and sft: directory of the tokenizer; the run's own if empty."
    ),
    hint: str = typer.Option(
        "", "--hint", metavar="TEXT", help="For sft: text that only the teacher was shown; it is left out."
    ),
    runs_dir: str = RunsDirOption,
) -> None:
    """Write a run's episodes as chat messages, rows for trainers, Inspect logs, ATIF or parquet."""
    from agentenv.runs.formats import Export, format_registry
    from agentenv.runs.store.reader import find_run

    written_as = format_registry[shape]
    source = find_run(name, runs_dir)
    export = Export(
        source,
        written_as.left_out,
        lambda: _decoder(source, tokenizer),
        min_reward,
        hint,
        lambda: _tokenizer(source, tokenizer),
    )
    if written_as.table is not None:
        target = Path(output or source.path / f"trajectories.{shape}")
        count = written_as.table(export, target)
    elif written_as.rows is not None:
        target = Path(output or source.path / f"{shape}.jsonl")
        count = _write(target, written_as.rows(export))
    elif written_as.files is not None:
        target = Path(output or source.path / shape)
        count = sum(_write(target / file, [document]) for file, document in written_as.files(export))
    else:
        raise UsageError(f"the format {shape} is only read", remedy="agentenv import reads it")
    print(f"{target}  {count} {written_as.unit}")
    for role in sorted(written_as.left_out):
        if number := sum(source.role(episode) == role for episode in source.summaries):
            print(f"left out: {number} {role} episodes")
    if not count:
        failed = sum(not episode.scored for episode in source.summaries)
        why = f"; {failed} have no score" if failed else ""
        low = sum(one.scored and (one.reward or 0.0) < min_reward for one in source.summaries)
        if shape == "sft" and low:
            why += f"; {low} have a reward below {min_reward:g}, which --min-reward sets"
        print(f"nothing was written: none of the {len(source)} episodes can be written as {shape}{why}")
        raise typer.Exit(1)


def _decoder(source: Any, tokenizer: str) -> Callable[[list[int]], str]:
    if not tokenizer:
        return source.decoder()
    from agentenv.engine.packaged import tokenizer_path
    from agentenv.render.tokenizer import ChatTokenizer

    return ChatTokenizer.load(tokenizer_path(tokenizer)).decode


def _tokenizer(source: Any, tokenizer: str) -> ChatTokenizer | None:
    """Return the run's tokenizer; say so if it is not known, and return None."""
    from agentenv.runs.recorded import chat_tokenizer_of

    try:
        return chat_tokenizer_of(source.info, tokenizer)
    except AgentEnvError as error:
        if tokenizer:
            raise
        print(f"rows are not compared with what was sampled: {error}")
    return None


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    from agentenv.core.errors import StoreError
    from agentenv.runs.store.codec import dumps

    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(json.loads(dumps(row)), ensure_ascii=True) + "\n")
                count += 1
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}", remedy="choose another file with --output"
        ) from error
    return count
