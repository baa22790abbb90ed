"""`agentenv sandbox`: which isolation runs on this machine, and why not a stronger one."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import typer

from agentenv.cli.options import JsonOption

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(as_json: bool = JsonOption) -> None:
    """Say which isolation for untrusted code works here, and how to get a stronger one."""
    from agentenv.sandbox.doctor import doctor

    found = doctor()
    sys.stdout.write((json.dumps(asdict(found)) if as_json else found.text()) + "\n")
    raise typer.Exit(0 if found.tier else 1)
