"""`agentenv sandbox`: show which isolation works on this machine; packages add verbs below it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import typer

from agentenv.cli.options import JsonOption
from agentenv.cli.verbs import PackagedGroup

__all__ = ["app"]

app = typer.Typer(cls=PackagedGroup, rich_markup_mode=None, add_completion=False)


@app.callback(invoke_without_command=True)
def run(ctx: typer.Context, as_json: bool = JsonOption) -> None:
    """Show which isolation for untrusted code works here, and how to get a stronger one."""
    if ctx.invoked_subcommand is not None:
        return
    from agentenv.sandbox.isolation import doctor

    report = doctor()
    sys.stdout.write((json.dumps(asdict(report)) if as_json else report.text()) + "\n")
    raise typer.Exit(0 if report.tier else 1)
