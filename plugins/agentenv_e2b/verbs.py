"""`agentenv sandbox serve`: serve this machine's sandbox to E2B's SDK."""

from __future__ import annotations

import typer

from agentenv.cli import AllowHostOption, NoTokenOption, TokenOption, chosen_token, say
from agentenv.core import UsageError, run_blocking
from agentenv_e2b.server import serve_forever

__all__ = ["serve"]


def serve(
    protocol: str = typer.Option("e2b", "--protocol", help="Protocol that is served; there is e2b only."),
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
    if protocol != "e2b":
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
