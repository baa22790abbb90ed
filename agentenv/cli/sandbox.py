"""`agentenv sandbox`: which isolation runs on this machine; `sandbox serve` lends it to E2B's SDK."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict

import typer

from agentenv.cli.options import JsonOption

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.callback(invoke_without_command=True)
def run(ctx: typer.Context, as_json: bool = JsonOption) -> None:
    """Say which isolation for untrusted code works here, and how to get a stronger one."""
    if ctx.invoked_subcommand is not None:
        return
    from agentenv.sandbox.doctor import doctor

    found = doctor()
    sys.stdout.write((json.dumps(asdict(found)) if as_json else found.text()) + "\n")
    raise typer.Exit(0 if found.tier else 1)


@app.command()
def serve(
    protocol: str = typer.Option("e2b", "--protocol", help="Protocol to speak; there is e2b."),
    host: str = typer.Option("127.0.0.1", "--host", help="Address; there is no password: keep it loopback."),
    port: int = typer.Option(8900, "--port", help="Port; 0 takes a free one."),
    size: int = typer.Option(4, "--size", help="Sandboxes that run code at once."),
    backend: str = typer.Option("auto", "--backend", help="auto, local, or none."),
) -> None:
    """Serve this machine's sandbox, so that E2B's own SDK runs code here."""
    from agentenv.sandbox.e2b.server import serve_forever

    asyncio.run(serve_forever(protocol=protocol, host=host, port=port, size=size, backend=backend))
