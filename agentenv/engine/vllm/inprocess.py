"""A vLLM engine inside this process, with the same behaviour as a vLLM server."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from itertools import count
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from agentenv.core.errors import (
    ContextTooLong,
    DependencyMissing,
    EngineError,
    EngineUnavailable,
    ModelNotFound,
    UsageError,
)
from agentenv.core.loops import LoopThread
from agentenv.engine.base import Completion, OnTokens, Sampling
from agentenv.engine.exact import VERSION_LABEL, exact_completion, room_for, version_ranges
from agentenv.engine.hf.load import ModelFiles
from agentenv.engine.vllm.build import find_build, sets_memory
from agentenv.engine.vllm.experts import read_experts
from agentenv.engine.vllm.supports import MOST_LOGPROBS, num_logprobs, with_supports
from agentenv.engine.weight_files import context_limit, require_weights, vocab_size

__all__ = ["VLLMEngine"]

T = TypeVar("T")

UNNAMED_LABEL = "default"
"""vLLM's own label of weights, until they are pushed."""


class VLLMEngine:
    """Samples from a vLLM engine that this process starts.

    vLLM starts with the first request, and runs on an event loop in a thread of its own. Requests may
    therefore come from any event loop, and go on while the caller's is busy.

    Args:
        files: the files of the model.
        name: the model string, which is stored in records.
        dtype: number format, under its name in vLLM.
        max_model_len: limit for prompt and completion together; that of the model if None.
        lora: whether adapters may be loaded.
        max_lora_rank: largest rank of an adapter.
        memory_share: share of the memory that vLLM reserves; None takes what fits, which is half of the free
            memory on a CPU and beside another model of this process.
        request_timeout_s: time limit of one request; it must suffice for the longest completion.
        sleep: whether vLLM frees its memory while the trainer of a synchronous run updates, so that
            both fit on one GPU; vLLM has this on GPUs only.
        return_routed_experts: whether completions tell to which experts of a mixture their tokens were sent.
        extra: further engine arguments for vLLM.
    """

    def __init__(
        self,
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
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.weights_version = 0
        # vLLM reports its limit once it runs, but the budgets of the first episodes are computed before.
        self.max_context_tokens: int | None = max_model_len or context_limit(files.path)
        self._vocab_size = vocab_size(files.path)
        path = str(Path(files.path) / files.gguf_file) if files.gguf_file else files.path
        self._arguments: dict[str, Any] = {
            "model": path,
            "dtype": dtype,
            # Log-probabilities are at the sampling temperature, and settings in model files do not apply.
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": MOST_LOGPROBS,
            "generation_config": "vllm",
            "enable_prefix_caching": True,
            "enable_lora": lora,
        }
        if lora:
            self._arguments["max_lora_rank"] = max_lora_rank
        if max_model_len is not None:
            self._arguments["max_model_len"] = max_model_len
        if memory_share is not None:
            self._arguments["gpu_memory_utilization"] = memory_share
        if sleep:
            self._arguments["enable_sleep_mode"] = True
        if return_routed_experts:
            self._arguments["enable_return_routed_experts"] = True
        self.tells_experts = return_routed_experts
        self._sleeps = sleep
        self._arguments.update(extra or {})
        self._engine: Any = None
        self._thread: LoopThread | None = None
        self._request_timeout_s = request_timeout_s
        # Both are used on vLLM's own event loop only.
        self._start: asyncio.Task[None] | None = None
        self._updating = asyncio.Lock()
        self._closing = threading.Lock()
        """Held while the engine is started or closed, so that no vLLM outlives its closed engine."""
        self._ids = count(1)
        self._adapters: dict[str, Any] = {}
        self._closed = False
        self._broken = ""
        """Why the weights are not known; empty if they are."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
    ) -> Completion:
        """Sample one completion; see `agentenv.engine.base.Engine`.

        Raises:
            ContextTooLong: The prompt leaves no room for a single token.
            EngineError: vLLM failed, or returned no exact tokens and logprobs.
            UsageError: No adapter of this name is loaded.
        """
        prompt = list(prompt_ids)
        return await self._on_own_loop(
            lambda: self._generate(prompt, sampling, stop_token_ids, session_id, deadline_s)
        )

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_tokens: OnTokens,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
    ) -> Completion:
        """Sample one completion and tell its tokens; see `agentenv.engine.base.StreamingEngine`."""
        prompt, loop = list(prompt_ids), asyncio.get_running_loop()

        def tell(tokens: Sequence[int]) -> None:
            with suppress(RuntimeError):  # the loop of the request was closed meanwhile
                loop.call_soon_threadsafe(on_tokens, tokens)

        return await self._on_own_loop(
            lambda: self._generate(prompt, sampling, stop_token_ids, session_id, deadline_s, tell=tell)
        )

    async def _generate(
        self,
        prompt: list[int],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        session_id: str | None,
        deadline_s: float | None,
        *,
        tell: OnTokens | None = None,
    ) -> Completion:
        engine = await self._started()
        room = room_for(self.name, prompt, sampling.max_tokens, self.max_context_tokens)
        adapter = sampling.adapter_or(None)
        if adapter is not None and adapter not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise UsageError(f"{self.name} has no adapter {adapter!r}", remedy=f"adapters loaded: {known}")
        request_id = f"{session_id or 'request'}-{next(self._ids)}"
        version = self.weights_version
        limit = min(inf if deadline_s is None else deadline_s, self._request_timeout_s)
        last: Any = None
        told = 0
        self._refuse_broken()
        try:
            async with asyncio.timeout(limit):
                async for output in engine.generate(
                    {"prompt_token_ids": prompt},
                    vllm_sampling(sampling, room, stop_token_ids, self._num_logprobs(sampling)),
                    request_id,
                    lora_request=None if adapter is None else self._adapters[adapter],
                ):
                    last = output
                    if tell is not None:
                        tokens = list(output.outputs[0].token_ids)  # all tokens so far
                        tell(tokens[told:])
                        told = len(tokens)
        except TimeoutError:
            if limit != deadline_s:
                raise EngineUnavailable(
                    f"{self.name} has not finished a request after {limit:g} s",
                    remedy="raise request_timeout_s if completions take longer",
                ) from None
            # Leaving the generator aborts the request; the tokens sampled until then are exact.
            return self._completion(last, version, sampling, stop_token_ids, room, aborted=True)
        except ValueError as error:
            wrong = ContextTooLong if "context length" in str(error) else EngineError
            raise wrong(f"{self.name}: {error}") from error
        except Exception as error:
            raise EngineError(f"{self.name} failed: {type(error).__name__}: {error}") from error
        self._refuse_broken()
        return self._completion(last, version, sampling, stop_token_ids, room)

    async def release(self, session_id: str) -> None:
        """Do nothing, because vLLM limits its prefix cache itself."""

    async def close(self) -> None:
        """Shut vLLM down and free its memory."""
        with self._closing:
            self._closed = True
            engine, self._engine = self._engine, None
        thread, self._thread = self._thread, None
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)
        if thread is not None:
            await asyncio.to_thread(thread.stop)

    async def rest(self) -> None:
        """Free the memory of weights and cache, with the option `sleep`; no request may be in flight."""
        if self._sleeps and self._engine is not None:
            # At level 1 the weights wait in the machine's memory, so that adapters keep their base model.
            await self._on_own_loop(lambda: self._engine.sleep(level=1))

    async def wake(self) -> None:
        """Take back the memory that `rest` freed, if it did."""
        if self._sleeps and self._engine is not None:
            await self._on_own_loop(self._wake)

    async def _wake(self) -> None:
        if await self._engine.is_sleeping():
            await self._engine.wake_up()

    async def load_adapter(self, name: str, path: str | Path, *, version: int | None = None) -> int:
        """Load a LoRA adapter, which replaces one of the same name; return the new weights version."""
        return await self._on_own_loop(lambda: self._load_adapter(name, path, version))

    async def _load_adapter(self, name: str, path: str | Path, version: int | None) -> int:
        from vllm.lora.request import LoRARequest

        engine = await self._started()
        async with self._paused(engine):
            replaces = name in self._adapters
            number = self._adapters[name].lora_int_id if replaces else len(self._adapters) + 1
            request = LoRARequest(
                lora_name=name, lora_int_id=number, lora_path=str(path), load_inplace=replaces
            )
            try:
                await engine.add_lora(request)
            except Exception as error:
                raise EngineError(f"{self.name} cannot load the adapter at {path}: {error}") from error
            self._adapters[name] = LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(path))
            return await self._new_version(version)

    async def load_weights(self, path: str | Path, *, version: int | None = None) -> int:
        """Load the full weights from a directory; return the new weights version.

        Requests in flight are paused meanwhile. The prefix cache of the old weights is dropped. If the
        weights cannot be loaded, all requests are refused until others have been.
        """
        require_weights(path, self._arguments["model"])
        return await self._on_own_loop(lambda: self._load_weights(path, version))

    async def _load_weights(self, path: str | Path, version: int | None) -> int:
        engine = await self._started()
        async with self._paused(engine):
            try:
                await self._reload(engine, path)
                new = await self._new_version(version)
            except BaseException:
                self._broken = f"{self.name} has unknown weights, because those at {path} could not be loaded"
                raise
            self._broken = ""
            return new

    async def _reload(self, engine: Any, path: str | Path) -> None:
        try:
            await engine.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
            dropped = await engine.reset_prefix_cache(True)
        except Exception as error:
            raise EngineError(f"{self.name} cannot load the weights at {path}: {error}") from error
        if dropped is False:
            raise EngineError(
                f"{self.name} did not drop the prefix cache of the old weights",
                remedy="load the model again",
            )

    def _refuse_broken(self) -> None:
        if self._broken:
            raise EngineError(self._broken, remedy="load complete weights, or the model again")

    @asynccontextmanager
    async def _paused(self, engine: Any) -> AsyncGenerator[None]:
        """Pause the requests in flight, so that the weights version of each token is known."""
        async with self._updating:
            try:
                await engine.pause_generation(mode="keep")
                yield
            finally:
                await engine.resume_generation()

    async def _new_version(self, version: int | None) -> int:
        self.weights_version = self.weights_version + 1 if version is None else version
        with suppress(AttributeError):  # older releases of vLLM have no weights versions
            await self._engine.update_weight_version(f"{VERSION_LABEL}{self.weights_version}")
        return self.weights_version

    async def _on_own_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on vLLM's event loop, which lives as long as vLLM does."""
        if self._closed:
            raise self._closed_error()
        if self._thread is None:
            self._thread = LoopThread(f"vllm {self.name}")
        return await self._thread.run(work())

    async def _started(self) -> Any:
        if self._engine is None:
            if self._start is None or self._start.done():  # a start that failed is tried again
                self._start = asyncio.create_task(asyncio.to_thread(self._start_vllm))
            # A start cannot be taken back, so a cancelled request leaves it to the next one.
            await asyncio.shield(self._start)
        return self._engine

    def _start_vllm(self) -> None:
        engine = start(self._arguments)
        with self._closing:
            if not self._closed:
                self._engine = engine
                self.max_context_tokens = engine.model_config.max_model_len
                return
        engine.shutdown()
        raise self._closed_error()

    def _closed_error(self) -> EngineError:
        return EngineError(f"the engine {self.name} is closed", remedy="load the model again")

    def _completion(
        self,
        output: Any,
        version: int,
        sampling: Sampling,
        stop: Sequence[int],
        room: int,
        *,
        aborted: bool = False,
    ) -> Completion:
        if output is None:
            return Completion((), (), "abort")
        choice = output.outputs[0]
        tokens = list(choice.token_ids)
        logprobs = [entry[token].logprob for entry, token in zip(choice.logprobs or (), tokens, strict=True)]
        versions = getattr(choice, "weight_versions", None) or ()
        spans = [(str(span.version), span.start, span.end) for span in versions]
        done = exact_completion(
            self.name,
            tokens,
            logprobs,
            "abort" if aborted else choice.finish_reason,
            stop=frozenset(stop),
            max_tokens=room,
            stop_strings=sampling.stop,
            ranges=version_ranges(spans, len(tokens), version, UNNAMED_LABEL),
            vocab_size=self._vocab_size,
            routed_experts=read_experts(getattr(choice, "routed_experts", None)),
        )
        if not sampling.wants_support:
            return done
        told = [[(token, one.logprob) for token, one in entry.items()] for entry in choice.logprobs or ()]
        return with_supports(done, told, self._num_logprobs(sampling), sampling)

    def _num_logprobs(self, sampling: Sampling) -> int:
        return num_logprobs(sampling, self._arguments["max_logprobs"], self._vocab_size)


def vllm_sampling(sampling: Sampling, room: int, stop: Sequence[int], logprobs: int = 0) -> Any:
    """Return the sampling parameters for vLLM; only stop ids and stop strings of the request end it."""
    # The import is by name, because a type checker would take `vllm` for this folder.
    return import_module("vllm").SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=room,
        seed=sampling.seed,
        logprobs=logprobs,
        stop_token_ids=list(stop),
        ignore_eos=True,
        stop=list(sampling.stop),
        # vLLM finds stop strings in the text, in which control tokens must be shown as the runner shows them.
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
    )


def start(arguments: Mapping[str, Any]) -> Any:
    """Start vLLM.

    Raises:
        DependencyMissing: vLLM is not installed.
        ModelNotFound: vLLM cannot load the model.
    """
    # Standard output belongs to our caller, so vLLM must log elsewhere.
    for name, value in {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }.items():
        os.environ.setdefault(name, value)
    try:
        vllm: Any = import_module("vllm")
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError:
        raise DependencyMissing.of("vllm", "vllm", purpose="vllm: models") from None
    if current_platform.is_cpu():
        # On a CPU, vLLM 0.32 crashes when a request with a seed has its prompt computed in chunks.
        arguments = {"enable_chunked_prefill": False, **arguments}
    arguments = {**fitting_memory(arguments), **arguments}
    began = monotonic()
    try:
        return AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**arguments))
    except Exception as error:
        raise ModelNotFound(
            f"vLLM could not start {arguments['model']} (after {monotonic() - began:.0f} s): "
            f"{type(error).__name__}: {error}"
        ) from error


def fitting_memory(arguments: Mapping[str, Any]) -> dict[str, float]:
    """Return the engine argument with which vLLM takes as much memory as fits; empty if its default does."""
    if sets_memory([f"--{name}" for name in arguments]):
        return {}
    import torch

    share = find_build(sys.executable).fitting_share(alone=not torch.cuda.is_initialized())
    return {} if share is None else {"gpu_memory_utilization": share}
