"""`agentenv import`: read the logs of other tools into a run, to view, compare and rescore them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from agentenv.cli.options import RunsDirOption, in_runs_dir
from agentenv.core.errors import UsageError

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(
    paths: list[str] = typer.Argument(..., metavar="FILE...", help="Chat logs or ATIF documents."),
    env_id: str = typer.Option("import/Chat-v0", "--env", help="Environment id for the episodes."),
    runs_dir: str = RunsDirOption,
) -> None:
    """Read OpenAI-style chat logs or ATIF documents into a run."""
    from agentenv.interop.atif import from_atif
    from agentenv.interop.chatlogs import from_openai
    from agentenv.runs.store.writer import RunWriter

    rows = [row for path in paths for row in read_rows(Path(path))]
    if not rows:
        raise UsageError(f"{', '.join(paths)}: there are no episodes", remedy="name a file that has some")
    atif = bool(rows) and "schema_version" in rows[0]
    episodes = list(from_atif(rows) if atif else from_openai(rows, env_id=env_id))
    ids = tuple(dict.fromkeys(episode.env_id for episode in episodes))
    with RunWriter.create(
        Path(paths[0]).stem, kind="import", runs_dir=runs_dir, env_ids=ids, config={"imported_from": paths}
    ) as writer:
        for index, episode in enumerate(episodes):
            writer.append(_distinct(episode, index, episodes))
    print(f"{len(episodes)} episodes   run {writer.id}")
    print(f" view: agentenv view {writer.id}{in_runs_dir(runs_dir)}")


def _distinct(episode: Any, index: int, episodes: list[Any]) -> Any:
    """Return the episode with a member number that no earlier episode of its group has."""
    from dataclasses import replace

    key = (episode.group_id, episode.member)
    earlier = sum((other.group_id, other.member) == key for other in episodes[:index])
    return replace(episode, member=episode.member + earlier) if earlier else episode


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a JSONL or JSON file.

    Raises:
        UsageError: The file cannot be read, or a line is not a JSON object; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    try:
        whole = json.loads(text)
        values = [(1, value) for value in (whole if isinstance(whole, list) else [whole])]
    except ValueError:
        values = []
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                values += [(number, json.loads(line))] if line.strip() else []
            except ValueError as error:
                raise UsageError(f"{path}, line {number} is not JSON: {error}") from error
    for number, value in values:
        if not isinstance(value, dict):
            raise UsageError(f"{path}, line {number} is not a JSON object: {value!r:.80}")
        yield value
