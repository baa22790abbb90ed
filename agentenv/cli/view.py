"""`agentenv view`: show runs, groups and episodes in a browser, from a file or live."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from urllib.parse import quote

import typer

from agentenv.cli.options import RunsDirOption

__all__ = ["run"]


def run(
    runs: list[str] = typer.Argument(None, metavar="RUN...", help="Ids or paths; RUN#12 for one episode."),
    output: str = typer.Option("", "--output", help="Write the page here and do not open it."),
    sort: str = typer.Option("", "--sort", help="Order of episodes: reward, tokens, turns, time, stop."),
    live: bool = typer.Option(False, "--live", help="Follow running runs from a server on this machine."),
    port: int = typer.Option(0, "--port", help="Port of the live server; any free one if 0."),
    max_mb: int = typer.Option(32, "--max-mb", help="Most MB of episodes; the worst come first."),
    browser: bool = typer.Option(True, help="Open a browser."),
    runs_dir: str = RunsDirOption,
) -> None:
    """Show runs: every token as it was sampled, what is trained, and why each episode stopped."""
    from agentenv.core.errors import UsageError
    from agentenv.runs.store.reader import find_run, list_runs
    from agentenv.runs.view.page import build_page, write_page

    if sort and sort not in {"place", "task", "member", "reward", "stop", "turns", "tokens", "time"}:
        raise UsageError(
            f"cannot sort by {sort!r}",
            remedy="sort by reward, tokens, turns, time, stop, task or member",
        )
    names = [name.partition("#") for name in runs or []]
    chosen = [find_run(name, runs_dir) for name, _, _ in names] or list_runs(
        runs_dir, on_broken=lambda error: print(f" left out: {error}")
    )
    if live:
        from agentenv.runs.view.server import serve

        serve([run.path for run in chosen] if names else [], Path(runs_dir), port=port, open_browser=browser)
        return
    if not chosen:
        raise UsageError(f"there are no runs in {runs_dir}/", remedy="make a run with agentenv eval")
    only = [chosen[0].find(names[0][2])] if names and names[0][2] else []
    page = build_page(chosen, only=only, sort=sort, max_bytes=max_mb * 1_000_000)
    target = output or str(Path(runs_dir if not names else chosen[0].path) / "view.html")
    path = write_page(target, page)
    ids = [quote(run.id, safe="") for run in chosen]
    fragment = f"#/r/{ids[0]}/e/{chosen[0].summaries.index(only[0])}" if only else ""
    if len(names) > 1 and not only:
        fragment = f"#/compare/{'/'.join(ids)}"
    print(
        f"{path}{fragment} ({path.stat().st_size / 1e6:.1f} MB){'  open it in a browser' if output else ''}"
    )
    if browser and not output:
        webbrowser.open(path.resolve().as_uri() + fragment)
