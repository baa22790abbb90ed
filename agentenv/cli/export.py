"""`agentenv export`: write a run's episodes in the formats of other tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from agentenv.cli.options import RunsDirOption

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)
ROWS = {
    "openai": "chatlogs:to_openai",
    "sft": "chatlogs:to_sft",
    "trl": "trl:trl_samples",
    "verl": "verl:verl_samples",
    "slime": "slime:slime_samples",
    "prime-rl": "prime_rl:to_prime_rl",
}
"""Formats with one line for each row, and the function in `agentenv.interop` that makes the rows."""
FORMATS = (*ROWS, "inspect", "atif", "parquet")
_NOT_SAMPLED = frozenset({"demonstration", "held-out"})
LEFT_OUT = {
    "sft": frozenset({"held-out"}),
    "trl": _NOT_SAMPLED,
    "verl": _NOT_SAMPLED,
    "slime": _NOT_SAMPLED,
    "prime-rl": _NOT_SAMPLED,
}
"""Roles of a training's episodes that must not be trained on in a format: held-out ones never, and
demonstrations not where the rows count as samples of the policy."""
UNITS = {"trl": "rows", "verl": "rows", "slime": "rows", "inspect": "logs"}


@app.command()
def run(
    name: str = typer.Argument(..., metavar="RUN", help="Run to export."),
    shape: str = typer.Option("openai", "--as", help=", ".join(FORMATS) + "."),
    output: str = typer.Option("", "--output", help="File or directory; in the run's directory if empty."),
    min_reward: float = typer.Option(1.0, "--min-reward", help="For sft: least reward of an episode."),
    tokenizer: str = typer.Option(
        "", "--tokenizer", help="For slime: directory of the tokenizer; the run's stored texts if empty."
    ),
    hint: str = typer.Option(
        "", "--hint", metavar="TEXT", help="For sft: text that only the teacher was shown; it is left out."
    ),
    runs_dir: str = RunsDirOption,
) -> None:
    """Write a run's episodes as chat messages, rows for trainers, Inspect logs, ATIF or parquet."""
    from agentenv.core.errors import UsageError
    from agentenv.runs.store.parquet import write_parquet
    from agentenv.runs.store.reader import find_run

    if shape not in FORMATS:
        raise UsageError(f"there is no format {shape!r}", remedy=f"the formats are {', '.join(FORMATS)}")
    source = find_run(name, runs_dir)
    if shape in ROWS:
        target = Path(output or source.path / f"{shape}.jsonl")
        options = {"sft": {"min_reward": min_reward, "hint": hint}, "prime-rl": {"model": source.info.model}}
        count = _write(target, _rows(source, shape, tokenizer, options.get(shape, {})))
    elif shape == "parquet":
        target = Path(output or source.path / "trajectories.parquet")
        count = write_parquet(source, target)
    else:
        target = Path(output or source.path / shape)
        count = sum(_write(target / file, [document]) for file, document in _documents(source, shape))
    print(f"{target}  {count} {UNITS.get(shape, 'episodes')}")
    for role in sorted(LEFT_OUT.get(shape, ())):
        if number := sum(source.role(episode) == role for episode in source.summaries):
            print(f"left out: {number} {role} episodes")
    if not count:
        print(f"nothing was written: none of the {len(source)} episodes can be written as {shape}")
        raise typer.Exit(1)


def _rows(source: Any, shape: str, tokenizer: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    module, _, function = ROWS[shape].partition(":")
    rows = getattr(import_module(f"agentenv.interop.{module}"), function)
    left_out = LEFT_OUT.get(shape, frozenset[str]())
    if shape == "slime":
        groups = (group for group in source.groups() if source.role(group[0]) not in left_out)
        for group in rows(groups, _decoder(source, tokenizer)):
            for entry in group:
                yield from entry if isinstance(entry, list) else [entry]
    else:
        yield from rows((episode for episode in source if source.role(episode) not in left_out), **options)


def _decoder(source: Any, tokenizer: str) -> Callable[[list[int]], str]:
    if not tokenizer:
        return source.decoder()
    from agentenv.engine.packaged import tokenizer_path
    from agentenv.render.tokenizer import ChatTokenizer

    return ChatTokenizer.load(tokenizer_path(tokenizer)).decode


def _documents(source: Any, shape: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and content of each file, for a format that is a directory of documents."""
    if shape == "inspect":
        from agentenv.interop.inspect_log import to_inspect

        # The list of Inspect's viewer takes only files whose names begin with a time.
        made = source.info.created[:19].replace(":", "-") or "1970-01-01T00-00-00"
        for env_id, log in to_inspect(source, source.info).items():
            yield f"{made}+00-00_{env_id.replace('/', '-')}_{source.id}.json", log
        return
    from agentenv.interop.atif import to_atif

    for index, trajectory in enumerate(source):
        yield f"{index:05}.json", to_atif(trajectory, model=source.info.model)


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
