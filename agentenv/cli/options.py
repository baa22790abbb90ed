"""Options that several verbs share, so that they look alike everywhere."""

from __future__ import annotations

from typing import Any

import typer

__all__ = ["JsonOption", "ModelOption", "RunsDirOption", "SeedOption", "SettingsOption"]

ModelOption: Any = typer.Option(
    "mock", "-m", "--model", help="hf:PATH, vllm:PATH, http://HOST/v1, openai:NAME, scripted:FILE, or mock."
)
SeedOption: Any = typer.Option(0, "--seed", help="Seed of the run; every episode's follows from it.")
SettingsOption: Any = typer.Option(
    None, "-o", "--set", metavar="NAME=VALUE", help="A setting; may be repeated."
)
RunsDirOption: Any = typer.Option("runs", "--runs-dir", help="Directory of all runs.")
JsonOption: Any = typer.Option(False, "--json", help="Print one JSON object instead.")
