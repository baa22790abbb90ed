"""`agentenv serve`: a model with vLLM, set up for training, or an environment in OpenEnv's protocol."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from pathlib import Path

import typer

from agentenv.core.errors import UsageError

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(
    model: str = typer.Argument("", metavar="[MODEL]", help="Directory or Hub name of a model, for vLLM."),
    env: str = typer.Option("", "--env", metavar="ENV", help="Serve this environment to OpenEnv's clients."),
    host: str = typer.Option("127.0.0.1", "--host", help="Address; there is no password: keep it trusted."),
    port: int = typer.Option(8000, "--port", help="Port; 0 takes a free one for an environment."),
    sessions: int = typer.Option(64, "--sessions", help="Episodes at once, with --env."),
    dtype: str = typer.Option("auto", "--dtype", help="Weights' type, with MODEL."),
    max_model_len: int | None = typer.Option(None, "--max-model-len", help="Context tokens, with MODEL."),
    python: str = typer.Option(sys.executable, "--python", help="Interpreter that has vLLM, with MODEL."),
    log: Path = typer.Option(Path("vllm.log"), "--log", help="Takes what vLLM prints, with MODEL."),
    vllm: str = typer.Option("", "--vllm", metavar="ARGS", help="More arguments for vLLM, in one string."),
) -> None:
    """Serve a model (vLLM, ready for rollouts and weight updates) or an environment (OpenEnv)."""
    if bool(model) == bool(env):
        raise UsageError("serve takes one of MODEL and --env ENV", remedy="see agentenv serve --help")
    if env:
        from agentenv.interop.openenv import serve_forever

        asyncio.run(serve_forever(env, host=host, port=port, max_sessions=sessions, said=_say))
        return
    from agentenv.engine.vllm.launch import ServeOptions, serve

    options = ServeOptions(
        host=host,
        port=port,
        dtype=dtype,
        max_model_len=max_model_len,
        python=python,
        extra=shlex.split(vllm),
    )
    # A service manager's way to end us must end vLLM too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    serve(model, options, log=log, said=_say)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
