"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote
from typing import Any

import typer

__all__ = [
    "ConfigOption",
    "JsonOption",
    "ModelOption",
    "RunsDirOption",
    "SeedOption",
    "SettingsOption",
    "in_runs_dir",
    "typed",
]

ModelOption: Any = typer.Option(
    "mock",
    "-m",
    "--model",
    help="smollm2, hf:PATH, vllm:PATH, http://HOST/v1, openai:NAME, scripted:FILE, or mock.",
)
SeedOption: Any = typer.Option(0, "--seed", help="Seed of the run; the seeds of all episodes derive from it.")
SettingsOption: Any = typer.Option(
    None, "-o", "--set", metavar="SECTION.NAME=VALUE", help="Set a setting; may be repeated."
)
ConfigOption: Any = typer.Option(
    "", "--config", help="TOML file with a table for each section; options on the command line win."
)
_RUNS = "runs"
RunsDirOption: Any = typer.Option(_RUNS, "--runs-dir", help="Directory that contains the runs.")
JsonOption: Any = typer.Option(False, "--json", help="Print one JSON object instead.")


def in_runs_dir(runs_dir: str) -> str:
    """Return the option that a printed command needs to find a run: empty for the default directory."""
    return "" if runs_dir == _RUNS else f" --runs-dir {quote(runs_dir)}"


def typed(ctx: typer.Context, given: Mapping[str, Any], parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings whose options are on the command line, without those left at a default.

    Args:
        ctx: context of the command.
        given: all settings by name.
        parameters: name of the command's parameter, for settings whose parameter has another name.
    """
    sources = {name: ctx.get_parameter_source(parameters.get(name, name)) for name in given}
    return {
        name: given[name]
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }
