"""Start a vLLM server that is set up rightly for training, and wait until it is healthy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from agentenv.core.errors import DependencyMissing, EngineError
from agentenv.engine.hf.load import locate, require_whole

__all__ = ["ServeOptions", "running_server", "serve", "server_command"]

LOG_LINES = 12
VLLM_BUILD = """
import importlib.metadata, importlib.util
if importlib.util.find_spec("vllm") is None:
    raise SystemExit(1)
print([one.name + one.version for one in importlib.metadata.distributions() if one.name.startswith("vllm")])
"""
"""Prints the name and version of the installed build, such as `vllm0.32.0+cpu` or `vllm-cpu0.32.0`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How a vLLM server is started."""

    host: str = "127.0.0.1"
    """Weights can be changed by whoever reaches the server: keep it on a trusted network."""
    port: int = 8000
    dtype: str = "auto"
    max_model_len: int | None = None
    lora: bool = True
    """Adapters may be loaded while it runs."""
    max_lora_rank: int = 64
    dev_mode: bool = True
    """Full weights may be replaced while it runs."""
    python: str = sys.executable
    """The interpreter that has vLLM installed."""
    extra: Sequence[str] = ()
    """Passed on to vLLM as they are."""
    start_timeout_s: float = 600.0


def server_command(
    model: str, options: ServeOptions, *, cpu: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment variables that start a server.

    Args:
        model: directory or Hub name of the model.
        options: how it is started.
        cpu: it is vLLM's build for CPUs.

    Raises:
        ModelNotFound: There is no such model.
        UsageError: It is an adapter.
    """
    files = locate(model)
    require_whole(files, "vLLM")
    path = str(Path(files.path) / files.gguf_file) if files.gguf_file else files.path
    # The `vllm` script of some builds does not start; the module always does.
    command = [options.python, "-m", "vllm.entrypoints.openai.api_server", "--model", path]
    command += ["--host", options.host, "--port", str(options.port), "--dtype", options.dtype]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    command += ["--enable-prefix-caching", "--enable-scale-out"]
    if options.max_model_len is not None:
        command += ["--max-model-len", str(options.max_model_len)]
    if cpu:
        # vLLM 0.32 dies on a CPU of a request with a seed whose prompt is computed in pieces.
        command += ["--no-enable-chunked-prefill"]
    if options.lora:
        command += ["--enable-lora", "--max-lora-rank", str(options.max_lora_rank)]
    environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if options.lora:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if options.dev_mode:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    return [*command, *options.extra], environment


@contextmanager
def running_server(
    model: str, options: ServeOptions, *, log: Path, said: Callable[[str], None] = lambda _: None
) -> Generator[str]:
    """Run a server for the time of a block; yield its URL once it is healthy.

    Args:
        model: directory or Hub name of the model.
        options: how it is started.
        log: file that takes what the server prints.
        said: told what is being waited for.

    Raises:
        DependencyMissing: The interpreter has no vLLM.
        EngineError: The server ended before it was healthy, or was not healthy in time.
    """
    locate(model)
    command, environment = server_command(model, options, cpu=is_for_cpu(options.python))
    with log.open("ab") as out:
        process = subprocess.Popen(  # noqa: S603 - arguments are a list, nothing is interpreted
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            url = f"http://{options.host}:{options.port}"
            said(f"starting vLLM for {model} at {url}/v1 (log: {log})")
            wait_healthy(process, url, log, options.start_timeout_s)
            yield f"{url}/v1"
        finally:
            stop(process)


def is_for_cpu(python: str) -> bool:
    """Return whether an interpreter's vLLM is a build for CPUs.

    Raises:
        DependencyMissing: It has no vLLM.
    """
    asked = subprocess.run([python, "-c", VLLM_BUILD], check=False, capture_output=True, text=True)  # noqa: S603 - the user's own interpreter
    if asked.returncode:
        raise DependencyMissing.of(f"vllm (not in {python})", "vllm", purpose="a vLLM server")
    return "cpu" in asked.stdout


def wait_healthy(process: subprocess.Popen[bytes], url: str, log: Path, timeout_s: float) -> None:
    """Return when the server answers its health check.

    Raises:
        EngineError: It ended, or did not answer in time; the message has the end of its log.
    """
    opener = build_opener(ProxyHandler({}))
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if process.poll() is not None:
            raise EngineError(f"the server ended with exit code {process.returncode}:\n{tail(log)}")
        try:
            with opener.open(f"{url}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.3)
    raise EngineError(f"the server was not healthy after {timeout_s:g} s:\n{tail(log)}")


def stop(process: subprocess.Popen[bytes], grace_s: float = 10.0, worker_grace_s: float = 5.0) -> None:
    """End a server and its workers, also those that outlive it although it tells them to end."""
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


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-LOG_LINES:])


def serve(model: str, options: ServeOptions, *, log: Path, said: Callable[[str], None]) -> None:
    """Run a server until it is interrupted: what `agentenv serve` does.

    Raises:
        EngineError: The server did not start, or ended by itself.
    """
    from agentenv.engine.vllm.probe import probe

    with running_server(model, options, log=log, said=said) as url:
        report = probe(url)
        said(f"ready: -m {url} (vLLM {report.version}, {report.max_context_tokens} tokens)")
        for lack in report.missing:
            said(f"it lacks {lack}")
        opener = build_opener(ProxyHandler({}))
        try:
            while True:
                time.sleep(2)
                with opener.open(f"{url.removesuffix('/v1')}/health", timeout=60):
                    pass
        except KeyboardInterrupt:
            said("stopping")
        except (URLError, OSError) as error:
            raise EngineError(f"the server stopped answering ({error}):\n{tail(log)}") from None
