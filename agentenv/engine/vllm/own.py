"""A vLLM server of one's own, which `vllm:PATH` starts and ends.

The server listens on a socket file that only this user can open, and ends with this process, however that
ends.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import finalize

from agentenv.core.errors import EngineError, ModelNotFound
from agentenv.engine.hf.load import ModelFiles
from agentenv.engine.interface import Features
from agentenv.engine.vllm.launch import ServeOptions, running_server
from agentenv.engine.vllm.probe import ServerReport, probe
from agentenv.engine.vllm.server import VLLMServerEngine

__all__ = ["OwnServerEngine", "start_server"]


class OwnServerEngine(VLLMServerEngine):
    """Samples from a vLLM server that `start_server` started; closing the engine ends the server.

    Args:
        report: report of the probe.
        name: the model string, which is stored in records.
        running: ends the server.
        sleep: whether the server frees its memory while the trainer of a synchronous run updates.
        lora: whether adapters may be loaded.
        options: options of `VLLMServerEngine`.
    """

    def __init__(
        self, report: ServerReport, *, name: str, running: ExitStack, sleep: bool, lora: bool, **options: Any
    ) -> None:
        super().__init__(report, **options)
        self.name = name
        self._sleeps = sleep
        # Adapters keep their base model, which waits in main memory (level 1). Full weights are dropped
        # (level 2), because the next ones overwrite them.
        self._level = 1 if lora else 2
        self._rests = False
        # A program that forgets to close the engine must not leave the server behind.
        self._end = finalize(self, running.close)

    @property
    def features(self) -> Features:
        """Those of any server, and the memory of this one can be freed."""
        return replace(super().features, rest=self.rest, wake=self.wake)

    async def close(self) -> None:
        """End the server."""
        await super().close()
        self._end()

    async def rest(self) -> None:
        """Free the memory of weights and cache, with the option `sleep`; no request may be in flight."""
        await self._command(f"/sleep?level={self._level}")
        self._rests = self._sleeps

    async def wake(self, renewed: bool) -> None:
        """Take back the memory that `rest` freed, if it did.

        Args:
            renewed: whether new weights are brought next; otherwise those that were dropped are read again.
        """
        if self._sleeps:
            _give_back()
        await self._command("/wake_up")
        if self._rests and self._level > 1 and not renewed:
            await self._weights.reload()
        self._rests = False

    async def _command(self, path: str) -> None:
        if self._sleeps:
            (server,) = self._pool.servers
            await self._pool.command(server, path, {}, limit_s=self._pool.request_timeout_s)


def _give_back() -> None:
    """Give back the device memory that torch keeps in this process for its next tensors.

    After an update that is what the activations took, which may be most of the device. No other process can
    use it meanwhile.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def start_server(
    files: ModelFiles,
    *,
    name: str = "vllm",
    dtype: str = "auto",
    max_model_len: int | None = None,
    lora: bool = False,
    max_lora_rank: int = 64,
    memory_share: float | None = None,
    request_timeout_s: float = 1800.0,
    sleep: bool = False,
    return_routed_experts: bool = False,
    start_timeout_s: float = 600.0,
    extra: Mapping[str, Any] | None = None,
) -> OwnServerEngine:
    """Start a vLLM server for this process alone, and return the engine that samples from it.

    Args:
        files: the files of the model.
        name: the model string, which is stored in records.
        dtype: number format, under its name in vLLM.
        max_model_len: limit for prompt and completion together; that of the model if None.
        lora: whether adapters may be loaded.
        max_lora_rank: largest rank of an adapter.
        memory_share: share of the memory that vLLM reserves; None takes what fits, which is half of the free
            memory on a CPU and beside a model of this process.
        request_timeout_s: time limit of one request; it must suffice for the longest completion.
        sleep: whether vLLM frees its memory while the trainer of a synchronous run updates, so that
            both fit on one GPU; vLLM has this on GPUs only.
        return_routed_experts: whether completions tell to which experts of a mixture their tokens were sent.
        start_timeout_s: seconds after which a server that does not answer counts as failed.
        extra: further engine arguments for vLLM, such as `{"max_num_seqs": 32}`.

    Raises:
        DependencyMissing: vLLM is not installed.
        ModelNotFound: vLLM cannot load the model.
    """
    place = Path(tempfile.mkdtemp(prefix="agentenv-vllm-"))
    torch: Any = sys.modules.get("torch")
    options = ServeOptions(
        socket=str(place / "socket"),
        dtype=dtype,
        max_model_len=max_model_len,
        lora=lora,
        max_lora_rank=max_lora_rank,
        memory_share=memory_share,
        alone=torch is None or not torch.cuda.is_initialized(),
        start_timeout_s=start_timeout_s,
        extra=[
            *(["--enable-sleep-mode"] if sleep else ()),
            *(["--enable-return-routed-experts"] if return_routed_experts else ()),
            *(word for key, value in (extra or {}).items() for word in argument(key, value)),
        ],
    )
    path = str(Path(files.path) / files.gguf_file) if files.gguf_file else files.path
    report, running = _running(path, options, place)
    return OwnServerEngine(
        report, name=name, running=running, sleep=sleep, lora=lora, request_timeout_s=request_timeout_s
    )


def _running(path: str, options: ServeOptions, place: Path) -> tuple[ServerReport, ExitStack]:
    """Start a server; return what it can do, and what ends it and deletes its directory."""
    with ExitStack() as server:
        try:
            url = server.enter_context(running_server(path, options, log=place / "log"))
            report = probe(url, socket=options.socket)
        except EngineError as error:
            # The directory is kept, because it has the log.
            remedy = error.remedy
            raise ModelNotFound(f"vLLM could not start {path}: {error.message}", remedy=remedy) from error
        running = ExitStack()
        running.callback(shutil.rmtree, place, ignore_errors=True)
        running.enter_context(server.pop_all())
    return report, running


def argument(name: str, value: object) -> list[str]:
    """Return an engine argument of vLLM as words of its command line."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]
