"""Start a training on the GPUs of one machine: processes that train, and vLLM servers that sample.

The division is the one that `agentenv plan` prints: of those that fit, the one with the fewest expected
seconds for a step, by speeds that are measured first. The trainers have the first GPUs and the servers the
others. Each trainer is a process with the command line that was typed, as torchrun would start it, and the
addresses of the servers.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentenv.core.errors import UsageError
from agentenv.engine.vllm.launch import ServeOptions, running_server, visible_devices
from agentenv.placement.machine import Machine, Speeds
from agentenv.placement.measure import measured
from agentenv.placement.needs import DryRuns
from agentenv.placement.placement import Placement
from agentenv.placement.report import plan_capacity
from agentenv.placement.shape import read_config
from agentenv.training.config import GRPOConfig

__all__ = ["Division", "device_here", "divide", "machine_of", "run_divided", "trainer_processes"]

DEFAULT_CONTEXT = 8192
"""Length of the longest episode in tokens, where no limit says it."""
LEAVE_S = 30.0
"""Seconds that the other trainers have to end after one has failed, or after a signal."""
LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Division:
    """Which GPUs of a machine train and which sample."""

    trainers: tuple[int, ...]
    """Numbers of the GPUs that train, each with a process of its own, among those that this process sees."""
    servers: tuple[tuple[int, ...], ...]
    """Numbers of the GPUs of each server; empty if the only GPU does both."""
    context: int
    """Tokens of the longest episode, which the servers accept."""
    fsdp: bool | int = True
    """The setting of several trainers: the number that share a copy of the model, or all of them."""
    options: ServeOptions = field(default_factory=ServeOptions)
    """The options of all servers: what the training needs them to have."""
    measured: Speeds | None = None
    """The speeds of a device by which it was chosen, if they were measured."""

    def __str__(self) -> str:
        if not self.servers:
            return "the GPU trains, and samples while it does not"
        each = ", ".join("+".join(map(str, one)) for one in self.servers)
        measured = "" if self.measured is None else f" (measured: {self.measured})"
        return f"GPUs {', '.join(map(str, self.trainers))} train; servers on {each}{measured}"


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


def device_here() -> str | None:
    """Return the kind of the devices of this machine that train; None if it has none."""
    import torch

    return "cuda" if torch.cuda.is_available() else None


def divide(
    model: str,
    train: GRPOConfig,
    machine: Machine,
    context: int | None = None,
    *,
    device: str | None = None,
) -> Division:
    """Divide the GPUs of a machine between the training of a model and its sampling.

    Args:
        model: directory or Hub id of the model, of which only the config is read.
        train: options of the training.
        machine: the GPUs.
        context: tokens of the longest episode; None means 8,192, or fewer if the model takes fewer.
        device: kind of device whose speed is measured first; None takes that of the kind that the machine
            names.

    Raises:
        UsageError: The training does not fit; the remedy names what does.
    """
    runs = DryRuns(read_config(model))
    longest = getattr(runs.model.get_text_config(), "max_position_embeddings", None) or DEFAULT_CONTEXT
    context = context or min(DEFAULT_CONTEXT, longest)
    if device is not None and machine.gpus > 1:
        machine = measured(machine, model, context, device)
    plan = plan_capacity(runs, train, model=model, context=context, machine=machine)
    if not plan.placement.fits:
        nearest = " or ".join(one.change for one in plan.alternatives) or "a smaller model"
        raise UsageError(
            f"training {model} with a context of {context:,} tokens does not fit on {machine}",
            remedy=f"the nearest that fits: {nearest} (agentenv plan says more)",
        )
    options = ServeOptions(
        lora=train.lora is not None,
        max_lora_rank=0 if train.lora is None else train.lora.r,
        extra=("--enable-return-routed-experts",) if train.router_replay else (),
    )
    division = _numbered(plan.placement, context, train.fsdp or True)
    return replace(division, options=options, measured=machine.measured)


def _numbered(placement: Placement, context: int, fsdp: bool | int) -> Division:
    first, size = placement.trainers, placement.tensor_parallel
    servers = [tuple(range(first + at * size, first + (at + 1) * size)) for at in range(placement.servers)]
    return Division(tuple(range(first)), tuple(servers), context, fsdp)


def trainer_processes(
    division: Division, words: Sequence[str], urls: Sequence[str], port: int
) -> list[tuple[list[str], dict[str, str]]]:
    """Return the command and the environment variables of each process that trains.

    Args:
        division: the division of the GPUs.
        words: the command line of `agentenv train`, without `--gpus`.
        urls: addresses of the servers.
        port: free port at which the processes meet.
    """
    command = [sys.executable, "-P", "-m", "agentenv", "train", *words]
    command += ["-o", f"train.engine={','.join(urls)}"]
    size = len(division.trainers)
    devices = visible_devices(division.trainers)
    if size == 1:
        return [(command, devices)]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    return [
        (
            [*command, "-o", f"train.fsdp={str(division.fsdp).lower()}"],
            {**devices, **meet, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]


Serve = Callable[[str, ServeOptions, Path], AbstractContextManager[str]]
"""Starts a server for a model, with its log, and yields its address."""


def _serve(model: str, options: ServeOptions, log: Path) -> AbstractContextManager[str]:
    return running_server(model, options, log=log)


def run_divided(
    division: Division, model: str, words: Sequence[str], logs: Path, *, serve: Serve = _serve
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
    with ExitStack() as stack:

        def start(server: AbstractContextManager[str]) -> str:
            return stack.enter_context(server)

        starting = list(_servers(division, model, logs, serve))
        with ThreadPoolExecutor(len(starting)) as pool:
            urls = list(pool.map(start, starting))
        with _running(trainer_processes(division, words, urls, _free_port())) as processes:
            return _exit_code(processes)


def _servers(
    division: Division, model: str, logs: Path, serve: Serve
) -> Iterator[AbstractContextManager[str]]:
    for number, devices in enumerate(division.servers):
        extra = list(division.options.extra)
        if len(devices) > 1:
            extra += ["--tensor-parallel-size", str(len(devices))]
        options = replace(
            division.options,
            port=_free_port(),
            max_model_len=division.context,
            devices=devices,
            extra=extra,
        )
        yield serve(model, options, logs / f"vllm-{number}.log")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def _running(
    commands: Sequence[tuple[list[str], Mapping[str, str]]],
) -> Generator[list[subprocess.Popen[bytes]]]:
    """Run the processes during a `with` block. What ends this process ends them, too."""
    processes: list[subprocess.Popen[bytes]] = []

    def end(*_: object) -> None:
        for process in processes:  # as Ctrl-C does, so that they write a checkpoint
            process.send_signal(signal.SIGINT)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        with _interruptible():
            for command, environment in commands:
                # In the group of this process, so that Ctrl-C reaches them as it does without this process.
                processes.append(subprocess.Popen(command, env={**os.environ, **environment}))  # noqa: S603
        yield processes
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _interruptible() -> Generator[None]:
    """Let the processes that start in a `with` block hear SIGINT, which a shell's background jobs ignore."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _exit_code(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all processes have ended; after a failure the others have a moment to notice it."""
    interrupted = False
    until: float | None = None
    while any(process.poll() is None for process in processes):
        try:
            time.sleep(LOOK_EVERY_S)
        except KeyboardInterrupt:  # they got it too, write their checkpoint and end
            interrupted = True
        failed = any(process.poll() for process in processes)
        if until is None and (failed or interrupted):
            until = time.monotonic() + LEAVE_S
        if until is not None and time.monotonic() > until:
            break
    codes = [1 if code is None else code for code in (process.poll() for process in processes)]
    return next((code for code in codes if code), 130 if interrupted else 0)
