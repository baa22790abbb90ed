"""`agentenv sandbox`: show which isolation works on this machine.

`sandbox serve` offers it to E2B's SDK, and `sandbox sweep` removes the containers of dead runs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import typer

from agentenv.cli.options import AllowHostOption, JsonOption, NoTokenOption, TokenOption, chosen_token, say
from agentenv.core.loops import run_blocking

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.callback(invoke_without_command=True)
def run(ctx: typer.Context, as_json: bool = JsonOption) -> None:
    """Show which isolation for untrusted code works here, and how to get a stronger one."""
    if ctx.invoked_subcommand is not None:
        return
    from agentenv.sandbox.doctor import doctor

    report = doctor()
    sys.stdout.write((json.dumps(asdict(report)) if as_json else report.text()) + "\n")
    raise typer.Exit(0 if report.tier else 1)


@app.command()
def serve(
    protocol: str = typer.Option("e2b", "--protocol", help="Sandbox whose protocol is served; e2b has one."),
    host: str = typer.Option("127.0.0.1", "--host", help="Address; other machines reach any but loopback."),
    port: int = typer.Option(8900, "--port", help="Port; 0 takes a free one."),
    size: int = typer.Option(4, "--size", help="Number of sandboxes that run code at once."),
    backend: str = typer.Option("auto", "--backend", help="auto, local, or none."),
    sandboxes: int = typer.Option(64, "--sandboxes", help="Number of sandboxes that exist at once."),
    token: str = TokenOption,
    no_token: bool = NoTokenOption,
    allow_host: list[str] = AllowHostOption,
) -> None:
    """Serve this machine's sandbox, so that E2B's own SDK runs code here."""
    from agentenv.core.errors import UsageError
    from agentenv.sandbox.base import sandbox_registry

    is_known = protocol in sandbox_registry
    serve_forever = getattr(sandbox_registry[protocol], "serve_forever", None) if is_known else None
    if serve_forever is None:
        raise UsageError(f"unknown sandbox protocol {protocol!r}", remedy="use e2b")
    run_blocking(
        serve_forever(
            said=say,
            host=host,
            port=port,
            size=size,
            backend=backend,
            max_sandboxes=sandboxes,
            token=chosen_token(token, no_token),
            allowed_hosts=allow_host or (),
        )
    )


@app.command()
def sweep(
    everything: bool = typer.Option(False, "--all", help="Also those of runs that go on."),
    as_json: bool = JsonOption,
) -> None:
    """Remove the containers that killed runs left behind."""
    from agentenv.sandbox.base import sandbox_registry

    removed: dict[str, list[str]] = {}
    for name in sandbox_registry:
        sweeps = None if sandbox_registry.needs(name) else getattr(sandbox_registry[name], "sweep", None)
        if sweeps is not None:
            removed[name] = run_blocking(sweeps(everything=everything))
    if as_json:
        sys.stdout.write(json.dumps(removed) + "\n")
        return
    for name, containers in removed.items():
        sys.stdout.write("".join(f"{name}: removed {container}\n" for container in containers))
    sys.stdout.write(f"{sum(map(len, removed.values()))} containers removed\n")
