"""`agentenv train --gpus N`: divide the GPUs of this machine, and start trainers and servers on them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from agentenv.cli.options import say
from agentenv.core.errors import UsageError
from agentenv.core.limits import RunLimits
from agentenv.core.settings import build
from agentenv.engine.listed import names_servers
from agentenv.placement.on_gpus import divide, machine_of, run_divided
from agentenv.runs.store.reader import find_run
from agentenv.training.config import GRPOConfig

__all__ = ["train_on_gpus", "words_of"]


def train_on_gpus(ctx: typer.Context, gpus: str, options: Mapping[str, Any]) -> None:
    """Train on GPUs of this machine, and exit; return if one GPU does it all in this process.

    Args:
        ctx: context of the command.
        gpus: number of GPUs, or number and memory such as `8x80`.
        options: the settings by section, with `resume` and `runs_dir`.

    Raises:
        Exit: The processes have ended.
        UsageError: An engine is named too, this process belongs to a launch, or the training does not fit.
    """
    record: Mapping[str, Any] = {}
    if options["resume"]:
        record = find_run(options["resume"], options["runs_dir"]).info.config
    config = _config(options, record)
    if config.engine or names_servers(config.model) or config.model.startswith("vllm:"):
        raise UsageError(
            f"--gpus {gpus} starts servers of its own, and {config.engine or config.model} names one",
            remedy="name a directory or a Hub id with -m, or leave --gpus out",
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("--gpus starts the processes that train", remedy="leave torchrun out")
    limits = build(RunLimits, record.get("limits", {}), options["limits"])
    machine, longest = machine_of(gpus), limits.max_context_tokens
    division = divide(config.model, config, machine, longest)
    if division.servers:
        # The processes that train take the setting too: theirs is how long they look for the servers.
        if start_timeout_s := {**record.get("engine", {}), **options["engine"]}.get("start_timeout_s"):
            serving = replace(division.options, start_timeout_s=float(start_timeout_s))
            division = replace(division, options=serving)
        say(f"{division}; the servers start")
        logs = Path(options["runs_dir"]) / "servers"
        raise typer.Exit(run_divided(division, config.model, words_of(ctx, {"gpus"}), logs))


def _config(options: Mapping[str, Any], record: Mapping[str, Any]) -> GRPOConfig:
    """Return the options of the training, those of a resumed run without its engine."""
    if record:
        return build(GRPOConfig, {**record["train"], "engine": ""})
    config = build(GRPOConfig, options["train"])
    if not config.model:
        raise UsageError("no model to train is named", remedy="name one (-m), such as ./SmolLM2")
    return config


def words_of(ctx: typer.Context, left_out: set[str]) -> list[str]:
    """Return the arguments and options that stand on the command line, as another process may get them."""
    words: list[str] = []
    for parameter in ctx.command.params:
        name = parameter.name or ""
        source = ctx.get_parameter_source(name)
        if name in left_out or source is None or source.name != "COMMANDLINE":
            continue
        given = ctx.params[name]
        values = given if isinstance(given, (list, tuple)) else [given]
        flag = parameter.param_type_name == "option"
        for value in values:
            if value is True:
                words.append(parameter.opts[-1])
            elif flag:
                words.append(f"{parameter.opts[-1]}={value}")
            else:
                words.append(str(value))
    return words
