"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

__all__ = [
    "ConfigOption",
    "JsonOption",
    "ModelOption",
    "RunsDirOption",
    "SeedOption",
    "SettingsOption",
    "typed",
]

ModelOption: Any = typer.Option(
    "mock", "-m", "--model", help="hf:PATH, vllm:PATH, http://HOST/v1, openai:NAME, scripted:FILE, or mock."
)
SeedOption: Any = typer.Option(0, "--seed", help="Seed of the run; the seeds of all episodes derive from it.")
SettingsOption: Any = typer.Option(
    None, "-o", "--set", metavar="SECTION.NAME=VALUE", help="Set a setting; may be repeated."
)
ConfigOption: Any = typer.Option(
    "", "--config", help="TOML file with a table for each section; options on the command line win."
)
RunsDirOption: Any = typer.Option("runs", "--runs-dir", help="Directory that contains the runs.")
JsonOption: Any = typer.Option(False, "--json", help="Print one JSON object instead.")


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
