"""Start a training on the GPUs of one machine: processes that train, and vLLM servers that sample.

The division is the one that `agentenv plan` prints. The trainers have the first GPUs and the servers the
others. torchrun starts a trainer on each GPU, with the command line that was typed and the addresses of the
servers.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentenv.core.errors import UsageError
from agentenv.core.processor import usable_cores
from agentenv.engine.vllm.launch import ServeOptions, running_server, visible_devices
from agentenv.placement.division import Machine, plan_capacity
from agentenv.placement.sizes import read_config
from agentenv.training.config import GRPOConfig

__all__ = ["Division", "divide", "machine_of", "run_divided", "trainer_command"]

DEFAULT_CONTEXT = 8192
"""Length of the longest episode in tokens, where no limit says it."""

Serve = Callable[..., AbstractContextManager[str]]
"""Starts a server for a model, with options and its log, and yields its address."""


@dataclass(frozen=True, slots=True)
class Division:
    """Which GPUs of a machine train and which sample, by their numbers among those that this process sees."""

    trainers: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...]
    """The GPUs of each server; empty if the only GPU does both."""
    context: int
    """Tokens of the longest episode, which the servers accept."""
    fsdp: bool | int = True
    """The setting of several trainers: the number that share a copy of the model, or all of them."""
    options: ServeOptions = field(default_factory=ServeOptions)
    """The options of all servers: what the training needs them to have."""

    def __str__(self) -> str:
        if not self.servers:
            return "the GPU trains, and samples while it does not"
        each = ", ".join("+".join(map(str, one)) for one in self.servers)
        return f"GPUs {', '.join(map(str, self.trainers))} train; servers on {each}"


def machine_of(text: str) -> Machine:
    """Return the machine written as `8x80`, or `8` of the GPUs that are here.

    Raises:
        UsageError: There are fewer GPUs, or the text is not of this form.
    """
    if not text.isdecimal():
        return Machine.parse(text)
    import torch

    present = torch.cuda.device_count()
    if int(text) > present or not int(text):
        raise UsageError(
            f"--gpus {text}: this machine has {present} GPUs that torch can use",
            remedy="name at most as many; `agentenv plan --gpus 8x80` plans without any",
        )
    smallest = min(torch.cuda.get_device_properties(one).total_memory for one in range(int(text)))
    return Machine(int(text), max(1, smallest // 10**9))


def divide(model: str, train: GRPOConfig, machine: Machine, context: int | None = None) -> Division:
    """Divide the GPUs of a machine between the training of a model and its sampling.

    Args:
        model: directory or Hub id of the model, of which only the config is read.
        train: options of the training.
        machine: the GPUs.
        context: tokens of the longest episode; None means 8,192, or fewer if the model takes fewer.

    Raises:
        UsageError: The training does not fit; the remedy names what does.
    """
    config = read_config(model)
    longest = (config.get("text_config") or config).get("max_position_embeddings") or DEFAULT_CONTEXT
    context = context or min(DEFAULT_CONTEXT, longest)
    plan = plan_capacity(config, train, model=model, context=context, machine=machine)
    if not plan.placement.fits:
        raise UsageError(
            f"training {model} with a context of {context:,} tokens does not fit on {machine}",
            remedy=f"the nearest that fits: {' or '.join(plan.alternatives) or 'a smaller model'} "
            "(agentenv plan says more)",
        )
    options = ServeOptions(
        max_model_len=context,
        lora=train.lora is not None,
        max_lora_rank=0 if train.lora is None else train.lora.r,
        extra=("--enable-return-routed-experts",) if train.stream.router_replay else (),
    )
    first, size = plan.placement.trainers, plan.placement.tensor_parallel
    starts = range(first, first + plan.placement.servers * size, size)
    servers = tuple(tuple(range(start, start + size)) for start in starts)
    return Division(tuple(range(first)), servers, context, train.fsdp or True, options)


def trainer_command(
    division: Division, words: Sequence[str], urls: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts the processes that train, and its environment variables.

    Args:
        division: the division of the GPUs.
        words: the command line of `agentenv train`, without `--gpus`.
        urls: addresses of the servers.
    """
    train = ["-m", "agentenv", "train", *words, "-o", f"train.engine={','.join(urls)}"]
    environment = {**visible_devices(division.trainers), "PYTHONSAFEPATH": "1"}
    size = len(division.trainers)
    if size == 1:
        return [sys.executable, *train], environment
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
    # torchrun would give each process one thread.
    environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // size)))
    return [sys.executable, *launch, *train, "-o", f"train.fsdp={str(division.fsdp).lower()}"], environment


def run_divided(
    division: Division, model: str, words: Sequence[str], logs: Path, *, serve: Serve = running_server
) -> int:
    """Start the servers, then the processes that train; return the exit code when these have ended.

    Args:
        division: the division of the GPUs, with at least one server.
        model: the model to train.
        words: the command line of `agentenv train`, without `--gpus`.
        logs: directory for the logs of the servers.
        serve: starts a server.

    Raises:
        EngineError: A server did not start.
    """
    logs.mkdir(parents=True, exist_ok=True)
    starting: list[AbstractContextManager[str]] = []
    for number, devices in enumerate(division.servers):
        parallel = ("--tensor-parallel-size", str(len(devices))) if len(devices) > 1 else ()
        extra = [*division.options.extra, *parallel]
        options = replace(division.options, port=_free_port(), devices=devices, extra=extra)
        starting.append(serve(model, options, log=logs / f"vllm-{number}.log"))
    with ExitStack() as stack:

        def start(server: AbstractContextManager[str]) -> str:
            return stack.enter_context(server)

        with ThreadPoolExecutor(len(starting)) as pool:
            urls = list(pool.map(start, starting))
        return _run(*trainer_command(division, words, urls))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command until it ends, also after Ctrl-C or SIGTERM, which give it time for a checkpoint."""
    processes: list[subprocess.Popen[bytes]] = []
    stopped: list[int] = []

    def stop(number: int, _: object) -> None:
        stopped.append(number)
        for process in processes:
            if number == signal.SIGTERM:  # Ctrl-C reaches it as it does this process
                process.terminate()

    before = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        processes.append(subprocess.Popen(command, env={**os.environ, **environment}))  # noqa: S603
        if stopped:
            processes[0].terminate()
        code = processes[0].wait()
        return 130 if code and stopped else code
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
