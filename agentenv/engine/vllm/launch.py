"""Start a vLLM server with the settings that training needs, and wait until it is healthy."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from agentenv.core.errors import EngineError, UsageError
from agentenv.engine.hf.load import locate, require_whole
from agentenv.engine.vllm.build import Build, find_build, sets_memory
from agentenv.engine.vllm.plugin import BACKEND
from agentenv.engine.vllm.probe import Asker, probe
from agentenv.engine.vllm.supports import MOST_LOGPROBS

__all__ = ["ServeOptions", "running_server", "serve", "server_command", "visible_devices"]

HEALTH_S, LONGEST_HEALTH_S = 5.0, 60.0
"""Seconds that a server may take to answer whether it is well, while it starts and while it runs."""
LOG_LINES = 12
"""Lines from the end of the log that an error message quotes."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as the largest rank of its adapters."""
PARALLEL = frozenset(
    ["--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp"]
)
"""Arguments that say over how many GPUs a model is spread."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
TIED = """
import os, runpy, signal, sys, threading
def end():
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end, daemon=True).start()
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Program that runs a module, and ends with all that it started when its input ends: when we do."""
ERROR_LINE = re.compile(
    r"^(?:\([^)]*\)\s*)?(?:ERROR\s[^\]]*\]\s*)?"
    r"(?P<error>[A-Za-z_][\w.]*(?:Error|Exception)(?::\s.*)|\S+: error: .*)$"
)
"""The line of a log that names an exception or a wrong argument, after the prefixes that vLLM adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options for starting a vLLM server."""

    host: str = "127.0.0.1"
    """Address to listen on; anyone who can reach the server can change its weights."""
    port: int = 8000
    """Port to listen on."""
    socket: str = ""
    """Path of a socket file to listen on in place of host and port; only this user can open it."""
    dtype: str = "auto"
    """Number format, under its name in vLLM."""
    max_model_len: int | None = None
    """Limit for prompt and completion together; that of the model if None."""
    lora: bool = True
    """Whether adapters can be loaded while the server runs."""
    max_lora_rank: int = 64
    """Largest rank of an adapter; vLLM gets the next one that it has."""
    dev_mode: bool = True
    """Whether the full weights can be replaced while the server runs."""
    transfer: bool = False
    """Whether the server can receive full weights from a trainer; agentenv must be installed beside vLLM."""
    python: str = sys.executable
    """The Python interpreter in whose environment vLLM is installed."""
    memory_share: float | None = None
    """Share of the memory that vLLM reserves; None takes what fits: on a CPU half of what is free."""
    alone: bool = True
    """Whether no model of this process needs memory too."""
    devices: Sequence[int] = ()
    """Numbers of the GPUs that it uses, among those that this process sees; empty for those that vLLM
    chooses."""
    extra: Sequence[str] = ()
    """Further command-line arguments for vLLM."""
    start_timeout_s: float = 600.0
    """Seconds after which a server that is not healthy counts as failed."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that the server is started with."""
        environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if self.lora:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if self.dev_mode:
            environment["VLLM_SERVER_DEV_MODE"] = "1"
        return environment | (visible_devices(self.devices) if self.devices else {})

    @property
    def gpus(self) -> int:
        """Number of GPUs that the server uses."""
        words = [word for argument in self.extra for word in argument.replace("_", "-").split("=", 1)]
        sizes = (int(size) for flag, size in pairwise(words) if flag in PARALLEL and size.isdecimal())
        return len(self.devices) or math.prod(sizes)


def visible_devices(devices: Sequence[int]) -> dict[str, str]:
    """Return the environment variable that shows a process some of the GPUs that this process sees.

    Args:
        devices: numbers of the GPUs, as this process counts them.

    Raises:
        UsageError: This process sees fewer GPUs.
    """
    shown = os.environ.get(VISIBLE)
    names = None if shown is None else [name.strip() for name in shown.split(",")]
    if names is not None and max(devices) >= len(names):
        raise UsageError(
            f"{VISIBLE}={shown} shows {len(names)} of the {max(devices) + 1} GPUs that are asked for",
            remedy=f"ask for {len(names)}, or let it show more",
        )
    return {VISIBLE: ",".join(str(device) if names is None else names[device] for device in devices)}


def server_command(model: str, options: ServeOptions, build: Build) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment variables that start a server.

    Args:
        model: directory or Hub name of the model.
        options: options of the server.
        build: the installed vLLM.

    Raises:
        ModelNotFound: There is no such model.
        UsageError: The model is an adapter, or adapters have a higher rank than vLLM takes.
    """
    files = locate(model)
    require_whole(files, "vLLM")
    path = str(Path(files.path) / files.gguf_file) if files.gguf_file else files.path
    # The `vllm` script of some builds does not start; the module always does.
    command = [options.python, "-m", "vllm.entrypoints.openai.api_server", "--model", path]
    command += ["--dtype", options.dtype]
    where = ["--host", options.host, "--port", str(options.port)]
    command += ["--uds", options.socket] if options.socket else where
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    command += ["--max-logprobs", str(MOST_LOGPROBS)]
    command += ["--enable-prefix-caching", "--enable-scale-out"]
    if (Path(files.path) / "preprocessor_config.json").is_file():
        # vLLM would normalise images by what this file says alone, without the defaults of its processor.
        command += ["--no-mm-device-do-normalize"]
    # The only library of vLLM's that reads our grammars; by itself it takes that of the first request.
    command += ["--structured-outputs-config", json.dumps({"backend": "guidance"})]
    if options.max_model_len is not None:
        command += ["--max-model-len", str(options.max_model_len)]
    share = options.memory_share
    if share is None and not sets_memory(options.extra):
        share = build.fitting_share(alone=options.alone)
    if share is not None:
        command += ["--gpu-memory-utilization", f"{share:g}"]  # this is its name on a CPU too
    if build.cpu:
        # On a CPU, vLLM 0.32 crashes when a request with a seed has its prompt computed in chunks.
        command += ["--no-enable-chunked-prefill"]
    if options.lora:
        command += ["--enable-lora", "--max-lora-rank", str(_lora_rank(options.max_lora_rank))]
        # Requests in flight end with the version that they began with, beside those of the next one.
        command += ["--max-loras", "2"]
    if options.transfer:
        command += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    return [*command, *options.extra], options.environment


def _lora_rank(largest: int) -> int:
    """Return the smallest rank that vLLM can be set to and that suffices."""
    enough = [rank for rank in LORA_RANKS if rank >= largest]
    if not enough:
        raise UsageError(
            f"vLLM takes adapters of a rank up to {LORA_RANKS[-1]}, not {largest}",
            remedy=f"set lora.r to {LORA_RANKS[-1]} or less",
        )
    return enough[0]


@contextmanager
def running_server(
    model: str, options: ServeOptions, *, log: Path, said: Callable[[str], None] = lambda _: None
) -> Generator[str]:
    """Run a server during a `with` block; yield its URL once it is healthy.

    Args:
        model: directory or Hub name of the model.
        options: options of the server.
        log: file to which the output of the server is appended.
        said: function that is called with messages about the progress.

    Raises:
        DependencyMissing: vLLM is not installed for the interpreter.
        EngineError: The server ended, or was not healthy in time.
    """
    locate(model)
    build = find_build(options.python, options.gpus, options.environment)
    command, environment = server_command(model, options, build)
    with log.open("ab") as out:
        output = Output(log, out.seek(0, os.SEEK_END))
        process = subprocess.Popen(  # noqa: S603 - arguments are a list, nothing is interpreted
            [command[0], "-c", TIED, *command[2:]],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            url = "http://localhost" if options.socket else f"http://{options.host}:{options.port}"
            said(f"starting vLLM for {model} at {url}/v1 (log: {log})")
            asker = Asker(url, None, HEALTH_S, socket=options.socket)
            wait_healthy(process, asker, output, options.start_timeout_s)
            yield f"{url}/v1"
        finally:
            stop(process)
            assert process.stdin is not None
            process.stdin.close()


@dataclass(frozen=True, slots=True)
class Output:
    """What a server has written to a log, to which earlier servers have written too."""

    log: Path
    """The file."""
    start: int = 0
    """Number of bytes that earlier servers have written."""

    def error(self, what: str) -> EngineError:
        """Return the error for a server that failed, with the first error line or else the last lines."""
        try:
            with self.log.open("rb") as file:
                file.seek(self.start)
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            lines = []
        # vLLM names the cause first. The errors that follow it say only that the server ended.
        found = (ERROR_LINE.match(line.strip()) for line in lines)
        cause = next((match["error"] for match in found if match), None)
        if cause is None:
            cause = "\n".join(["", *lines[-LOG_LINES:]])
        return EngineError(f"{what}: {cause}", remedy=f"its whole output is in {self.log}")


def wait_healthy(process: subprocess.Popen[bytes], asker: Asker, output: Output, timeout_s: float) -> None:
    """Wait until the server answers its health check.

    Raises:
        EngineError: The server ended or did not answer in time; the message quotes its log.
    """
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if process.poll() is not None:
            raise output.error(f"the server ended with exit code {process.returncode}")
        try:
            asker.read("/health")
        except EngineError:
            time.sleep(0.3)
        else:
            return
    raise output.error(f"the server was not healthy after {timeout_s:g} s")


def stop(process: subprocess.Popen[bytes], grace_s: float = 10.0, worker_grace_s: float = 5.0) -> None:
    """End a server, and kill those of its workers that are still running shortly afterwards."""
    if process.poll() is None:
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    until = time.monotonic() + worker_grace_s
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def serve(model: str, options: ServeOptions, *, log: Path, said: Callable[[str], None]) -> None:
    """Run a server until it is interrupted, as `agentenv serve` does.

    Raises:
        EngineError: The server did not start, or ended on its own.
    """
    start = log.stat().st_size if log.exists() else 0
    with running_server(model, options, log=log, said=said) as url:
        report = probe(url)
        said(f"ready: -m {url} (vLLM {report.version}, {report.max_context_tokens} tokens)")
        for lack in report.missing:
            said(f"it lacks {lack}")
        asker = Asker(url.removesuffix("/v1"), None, LONGEST_HEALTH_S)
        try:
            while True:
                time.sleep(2)
                asker.read("/health")
        except KeyboardInterrupt:
            said("stopping")
            raise
        except EngineError as error:
            raise Output(log, start).error(f"the server stopped answering ({error})") from None
