"""`agentenv serve`: serve a model with vLLM, an environment to OpenEnv's clients, or a model to agents."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import typer

from agentenv.cli.options import AllowHostOption, NoTokenOption, TokenOption, chosen_token, say
from agentenv.core.errors import UsageError
from agentenv.core.loops import run_blocking
from agentenv.core.serving.guard import Guard

__all__ = ["run"]


# Hidden, because --vllm has the type too, and what is printed at the start names the file.
_DTYPE: Any = typer.Option("auto", "--dtype", help="With MODEL: type of the weights.", hidden=True)
_LOG: Any = typer.Option(Path("vllm.log"), "--log", help="With MODEL: file for vLLM's output.", hidden=True)


def run(
    model: str = typer.Argument("", metavar="[MODEL]", help="Directory or Hub name of a model, for vLLM."),
    named: str = typer.Option("", "-m", "--model", help="The same, written as for other commands."),
    env: str = typer.Option("", "--env", metavar="ENV", help="Serve this environment to OpenEnv's clients."),
    capture: str = typer.Option(
        "", "--capture", metavar="MODEL", help="Serve this model to agents, and keep their episodes as a run."
    ),
    host: str = typer.Option(
        "127.0.0.1", "--host", help="Address; a model has no token, so keep it private."
    ),
    port: int = typer.Option(8000, "--port", help="Port; 0 takes a free one for an environment."),
    sessions: int = typer.Option(64, "--sessions", help="With --env: number of episodes at once."),
    token: str = TokenOption,
    no_token: bool = NoTokenOption,
    allow_host: list[str] = AllowHostOption,
    dtype: str = _DTYPE,
    max_model_len: int | None = typer.Option(
        None, "--max-model-len", help="With MODEL: tokens of the context."
    ),
    transfer: bool = typer.Option(
        False, "--transfer", help="With MODEL: full weights are sent to it (-o engine.transfer=gloo or nccl)."
    ),
    python: str = typer.Option(sys.executable, "--python", help="With MODEL: interpreter that has vLLM."),
    log: Path = _LOG,
    vllm: str = typer.Option("", "--vllm", metavar="ARGS", help="With MODEL: more arguments for vLLM."),
) -> None:
    """Serve a model (vLLM, ready for weight updates), an environment (OpenEnv), or a model to agents."""
    if [bool(model), bool(named), bool(env), bool(capture)].count(True) != 1:
        raise UsageError(
            "serve needs MODEL, --env ENV or --capture MODEL", remedy="see agentenv serve --help"
        )
    if capture:
        guard = Guard.of(host, chosen_token(token, no_token), allow_host or ())
        run_blocking(_capture(capture, guard, port))
        return
    if env:
        from agentenv.cli.verbs import verb_registry

        rules = {"token": chosen_token(token, no_token), "allowed_hosts": allow_host or ()}
        serving = verb_registry["serve.env"](
            env, host=host, port=port, said=say, max_sessions=sessions, **rules
        )
        run_blocking(serving)
        return
    from agentenv.engine.vllm.launch import ServeOptions, serve

    options = ServeOptions(
        host=host,
        port=port,
        dtype=dtype,
        max_model_len=max_model_len,
        transfer=transfer,
        python=python,
        extra=shlex.split(vllm),
    )
    serve(model or named.removeprefix("hf:").removeprefix("vllm:"), options, log=log, said=say)


async def _capture(model: str, guard: Guard, port: int) -> None:
    from agentenv.engine.factory import load_engine
    from agentenv.runs.capture import ENV_ID, capture_forever
    from agentenv.runs.store.writer import RunWriter

    loaded = load_engine(model)
    with RunWriter.create(ENV_ID, env_ids=(ENV_ID,), model=model) as writer:
        await capture_forever(loaded, writer, guard, port=port, said=say)
