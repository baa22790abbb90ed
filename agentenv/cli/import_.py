"""`agentenv import`: logs of others as a run, to be viewed, compared and scored again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from agentenv.cli.options import RunsDirOption

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(
    paths: list[str] = typer.Argument(..., metavar="FILE...", help="Chat logs or ATIF documents."),
    env_id: str = typer.Option("import/Chat-v0", "--env", help="Environment to file the episodes under."),
    runs_dir: str = RunsDirOption,
) -> None:
    """Read OpenAI-style chat logs or ATIF documents into a run."""
    from agentenv.interop.atif import from_atif
    from agentenv.interop.chatlogs import from_openai
    from agentenv.runs.store.writer import RunWriter

    rows = [row for path in paths for row in read_rows(Path(path))]
    atif = bool(rows) and "schema_version" in rows[0]
    episodes = list(from_atif(rows) if atif else from_openai(rows, env_id=env_id))
    ids = tuple(dict.fromkeys(one.env_id for one in episodes))
    with RunWriter.create(
        Path(paths[0]).stem, kind="import", root=runs_dir, env_ids=ids, config={"imported_from": paths}
    ) as writer:
        for place, one in enumerate(episodes):
            writer.append(_distinct(one, place, episodes))
    print(f"{len(episodes)} episodes   run {writer.id}")
    print(f" view: agentenv view {writer.id}")


def _distinct(one: Any, place: int, episodes: list[Any]) -> Any:
    """Return the episode under a member number of its own, where the log repeats one."""
    from dataclasses import replace

    earlier = sum((other.group_id, other.member) == (one.group_id, one.member) for other in episodes[:place])
    return replace(one, member=one.member + earlier) if earlier else one


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a JSONL or JSON file.

    Raises:
        UsageError: The file cannot be read, or a line is not a JSON object; the line is named.
    """
    from agentenv.core.errors import UsageError

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
