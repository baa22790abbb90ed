"""Start a vLLM server with the settings that training needs, and wait until it is healthy."""

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
"""Lines from the end of the log that an error message quotes."""
VLLM_BUILD = """
import importlib.metadata, importlib.util
if importlib.util.find_spec("vllm") is None:
    raise SystemExit(1)
builds = importlib.metadata.distributions()
print([build.name + build.version for build in builds if build.name.startswith("vllm")])
"""
"""Program that prints name and version of the installed build: `vllm0.32.0+cpu` or `vllm-cpu0.32.0`, say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options for starting a vLLM server."""

    host: str = "127.0.0.1"
    """Address to listen on; anyone who can reach the server can change its weights."""
    port: int = 8000
    """Port to listen on."""
    dtype: str = "auto"
    """Number format, under its name in vLLM."""
    max_model_len: int | None = None
    """Limit for prompt and completion together; that of the model if None."""
    lora: bool = True
    """Whether adapters can be loaded while the server runs."""
    max_lora_rank: int = 64
    """Largest rank of an adapter."""
    dev_mode: bool = True
    """Whether the full weights can be replaced while the server runs."""
    python: str = sys.executable
    """The Python interpreter in whose environment vLLM is installed."""
    extra: Sequence[str] = ()
    """Further command-line arguments for vLLM."""
    start_timeout_s: float = 600.0
    """Seconds after which a server that is not healthy counts as failed."""


def server_command(
    model: str, options: ServeOptions, *, cpu: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment variables that start a server.

    Args:
        model: directory or Hub name of the model.
        options: options of the server.
        cpu: whether the installed vLLM is a build for CPUs.

    Raises:
        ModelNotFound: There is no such model.
        UsageError: The model is an adapter.
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
        # On a CPU, vLLM 0.32 crashes when a request with a seed has its prompt computed in chunks.
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
    """Return True if the vLLM of an interpreter is a build for CPUs.

    Raises:
        DependencyMissing: vLLM is not installed for the interpreter.
    """
    result = subprocess.run([python, "-c", VLLM_BUILD], check=False, capture_output=True, text=True)  # noqa: S603 - the user's own interpreter
    if result.returncode:
        raise DependencyMissing.of(f"vllm (not in {python})", "vllm", purpose="a vLLM server")
    return "cpu" in result.stdout


def wait_healthy(process: subprocess.Popen[bytes], url: str, log: Path, timeout_s: float) -> None:
    """Wait until the server answers its health check.

    Raises:
        EngineError: The server ended or did not answer in time; the message quotes the end of its log.
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


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-LOG_LINES:])


def serve(model: str, options: ServeOptions, *, log: Path, said: Callable[[str], None]) -> None:
    """Run a server until it is interrupted, as `agentenv serve` does.

    Raises:
        EngineError: The server did not start, or ended on its own.
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
            raise
        except (URLError, OSError) as error:
            raise EngineError(f"the server stopped answering ({error}):\n{tail(log)}") from None
