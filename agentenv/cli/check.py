"""`agentenv check`: try an environment in every way a run would."""

from __future__ import annotations

import asyncio
import sys

import typer

from agentenv.cli.options import JsonOption, SeedOption

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(
    env: str = typer.Argument(..., metavar="ENV", help="Id, path/to/file.py, file.py:Class or module:Class."),
    tasks: int = typer.Option(20, "-n", "--tasks", help="Tasks that are played at most."),
    fuzz: int = typer.Option(300, "--fuzz", help="Random tool calls from the schemas."),
    only: list[str] = typer.Option([], "--only", help="Make only this check; may be repeated."),
    seed: int = SeedOption,
    as_json: bool = JsonOption,
) -> None:
    """Check an environment: schema, determinism, oracle, trivial answers, isolation, overflow, ..."""
    from agentenv.testing.checker import check_env

    report = asyncio.run(check_env(env, tasks=tasks, fuzz_calls=fuzz, seed=seed, only=tuple(only)))
    sys.stdout.write((report.to_json() if as_json else str(report)) + "\n")
    raise typer.Exit(report.exit_code)
