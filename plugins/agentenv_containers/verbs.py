"""`agentenv sandbox sweep`: remove the containers of dead runs."""

from __future__ import annotations

import json
import sys

import typer

from agentenv.core import run_blocking
from agentenv_containers.backend import DOCKER, PODMAN

__all__ = ["sweep"]


def sweep(
    everything: bool = typer.Option(False, "--all", help="Also those of runs that go on."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead."),
) -> None:
    """Remove the containers that killed runs left behind."""
    removed = {
        backend.runtime.program: run_blocking(backend.sweep(everything=everything))
        for backend in (DOCKER, PODMAN)
    }
    if as_json:
        sys.stdout.write(json.dumps(removed) + "\n")
        return
    for name, containers in removed.items():
        sys.stdout.write("".join(f"{name}: removed {container}\n" for container in containers))
    sys.stdout.write(f"{sum(map(len, removed.values()))} containers removed\n")
