"""Options that several verbs share."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from shlex import quote
from typing import Any

import typer

from agentenv.core.errors import UsageError

__all__ = [
    "AllowHostOption",
    "ConfigOption",
    "JsonOption",
    "ModelOption",
    "NoTokenOption",
    "RayOption",
    "RunsDirOption",
    "SeedOption",
    "SettingsOption",
    "TokenOption",
    "TrustOption",
    "WorkerEnvOption",
    "WorkersOption",
    "chosen_token",
    "in_runs_dir",
    "refuse_model",
    "say",
    "typed",
]

ModelOption: Any = typer.Option(
    "mock",
    "-m",
    "--model",
    help="smollm2, hf:PATH, vllm:PATH, http://HOST/v1, openai:NAME, scripted:FILE, "
    "policy:FILE.py:FUNCTION, oracle, random, or mock.",
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
TrustOption: Any = typer.Option(
    False,
    "--trust",
    help="Execute the code that the run names, although somebody else made the run.",
    hidden=True,  # rarely needed, and the error that asks for it names it
)
WorkersOption: Any = typer.Option(
    0, "--workers", help="Play in so many worker processes; with --ray ADDRESS, in Ray actors."
)
RayOption: Any = typer.Option(
    "", "--ray", hidden=True, help="Ray cluster of the workers: its address, or auto."
)  # hidden, because the help of --workers names it
WorkerEnvOption: Any = typer.Option(
    [], "--worker-env", hidden=True, help="Name of an environment variable that Ray actors get from here."
)
TokenOption: Any = typer.Option(
    "",
    "--token",
    envvar="AGENTENV_TOKEN",
    show_envvar=True,
    help="Token that clients send; a new one if empty. Others see what stands on a command line.",
)
NoTokenOption: Any = typer.Option(
    False, "--no-token", help="Let everyone act who reaches the server; only on this machine."
)
AllowHostOption: Any = typer.Option(
    None, "--allow-host", metavar="NAME", help="Also answer to this host name; may be repeated."
)


def chosen_token(token: str, no_token: bool) -> str | None:
    """Return the token of a server: None for a new one, and an empty one for none.

    Raises:
        UsageError: There are a token and the wish to have none.
    """
    if token and no_token:
        raise UsageError("--token and --no-token exclude each other", remedy="leave one of them out")
    return "" if no_token else token or None


def say(text: str) -> None:
    """Print a line on stderr at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def refuse_model(name: str, wanted: str, meant: str) -> None:
    """Refuse a model in the place of something else.

    Args:
        name: what was named.
        wanted: what should have been, in words.
        meant: the command that names a model so.
    """
    from agentenv.engine.forms import engine_registry

    if name.partition(":")[0] in engine_registry:
        raise UsageError(f"{name} is a model, and not {wanted}", remedy=f"write {meant}")


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
