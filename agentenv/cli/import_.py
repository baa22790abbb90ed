"""`agentenv import`: read logs and rows of other tools into a run, to view, compare and rescore them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agentenv.cli.options import RunsDirOption, in_runs_dir
from agentenv.core.errors import UsageError
from agentenv.core.files import json_lines, user_text

if TYPE_CHECKING:
    from agentenv.core.trajectory import Trajectory

__all__ = ["run"]


def run(
    paths: list[str] = typer.Argument(
        ...,
        metavar="FILE...",
        help="Chat logs, ATIF documents or their directory, or rows of TRL, verl, slime or prime-rl.",
    ),
    env_id: str = typer.Option("import/Chat-v0", "--env", help="Environment id of rows that name none."),
    tokenizer: str = typer.Option(
        "", "--tokenizer", help="Tokenizer of rows of tokens: its directory, or smollm2."
    ),
    runs_dir: str = RunsDirOption,
) -> None:
    """Read chat logs, ATIF documents or samples of trainers into a run."""
    from agentenv.engine.packaged import tokenizer_path
    from agentenv.render.tokenizer import ChatTokenizer
    from agentenv.runs.store.writer import RunWriter

    rows = [row for path in paths for file in _files(Path(path)) for row in read_rows(file)]
    if not rows:
        raise UsageError(f"{', '.join(paths)}: there are no episodes", remedy="name a file that has some")
    decoding = ChatTokenizer.load(tokenizer_path(tokenizer)) if tokenizer else None
    episodes = _episodes(rows, env_id, None if decoding is None else decoding.decode)
    ids = tuple(dict.fromkeys(episode.env_id for episode in episodes))
    with RunWriter.create(
        Path(paths[0]).stem, kind="import", runs_dir=runs_dir, env_ids=ids, config={"imported_from": paths}
    ) as writer:
        if decoding is not None:
            writer.keep_texts(decoding.backend)
        for episode in _distinct(episodes):
            writer.append(episode)
    print(f"{len(episodes)} episodes   run {writer.id}")
    print(f" view: agentenv view {writer.id}{in_runs_dir(runs_dir)}")


def _episodes(
    rows: Sequence[dict[str, Any]], env_id: str, decode: Callable[[list[int]], str] | None
) -> list[Any]:
    """Read the episodes of rows in the format that the first row has; in that of OpenAI if it has no other.

    Raises:
        UsageError: The rows are of a format that is only written.
    """
    from agentenv.runs.formats import format_registry

    keys = set(rows[0])
    formats = [row.item for row in format_registry.listing(load=True) if row.item is not None]
    readable = [known for known in formats if known.read is not None and known.keys <= keys]
    # Of two formats that fit, the one that asks for more keys says more about the row.
    best = max(readable, key=lambda known: len(known.keys), default=format_registry["openai"])
    assert best.read is not None
    return list(best.read(rows, env_id, decode))


def _distinct(episodes: Iterable[Trajectory]) -> Iterator[Trajectory]:
    """Yield the episodes, each with a member number that no earlier episode of its group has."""
    earlier = Counter[tuple[str, int]]()
    for episode in episodes:
        key = (episode.group_id, episode.member)
        yield replace(episode, member=episode.member + earlier[key]) if earlier[key] else episode
        earlier[key] += 1


def _files(path: Path) -> list[Path]:
    """Return the file, or the JSON files of a directory, in which ATIF documents are exported.

    Raises:
        UsageError: The directory contains no JSON file.
    """
    if not path.is_dir():
        return [path]
    if files := sorted(path.glob("*.json")):
        return files
    raise UsageError(f"there is no .json file in {path}", remedy="name a file that has episodes")


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a JSONL or JSON file.

    Raises:
        UsageError: The file cannot be read, or a line is not a JSON object; the message names the line.
    """
    try:
        text = user_text(path)
    except OSError as error:
        remedy = "name a file that has episodes"
        raise UsageError(f"cannot read {path}: {error.strerror}", remedy=remedy) from error
    values: Iterable[tuple[int, Any]]
    try:
        whole = json.loads(text)
        values = [(1, value) for value in (whole if isinstance(whole, list) else [whole])]
    except (ValueError, RecursionError):
        values = json_lines(path)
    for number, value in values:
        if not isinstance(value, dict):
            raise UsageError(f"{path}, line {number} is not a JSON object: {value!r:.80}")
        yield value
