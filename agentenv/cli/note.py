"""`agentenv note`: attach a text and tags to a run; the viewer's list shows them and finds runs by them."""

from __future__ import annotations

import json
import sys

import typer

from agentenv.cli.options import JsonOption, RunsDirOption

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def note(
    name: str = typer.Argument(..., metavar="RUN", help="The run."),
    text: list[str] = typer.Argument(None, metavar="TEXT...", help="The note; '' removes it."),
    tags: list[str] = typer.Option([], "--tag", help="Add a tag; may be repeated."),
    untags: list[str] = typer.Option([], "--untag", help="Remove a tag; may be repeated."),
    runs_dir: str = RunsDirOption,
    as_json: bool = JsonOption,
) -> None:
    """Write a note about a run, or give it tags. Without either, print them."""
    from agentenv.core.errors import UsageError
    from agentenv.runs.store.reader import find_run
    from agentenv.runs.store.user_note import UserNote

    run = find_run(name, runs_dir)
    old = run.user_note
    missing = [tag for tag in untags if tag not in old.tags]
    if missing:
        known = f"its tags are {', '.join(old.tags)}" if old.tags else "it has no tags"
        raise UsageError(f"run {run.id} has no tag {missing[0]!r}", remedy=known)
    kept = [tag for tag in old.tags if tag not in untags]
    new = UserNote(" ".join(text) if text else old.text, tuple(dict.fromkeys([*kept, *tags])))
    if new != old:
        new.write(run.path)
    if as_json:
        sys.stdout.write(json.dumps({"run": run.id, "text": new.text, "tags": list(new.tags)}) + "\n")
        return
    labels = "  ".join(f"[{tag}]" for tag in new.tags)
    print("  ".join(part for part in (run.id, labels, new.text) if part))
