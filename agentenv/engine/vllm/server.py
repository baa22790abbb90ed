"""The engine for running vLLM servers, which exchanges token ids and log-probabilities with them.

1. Token ids go through `/inference/v1/generate` if the server has it, else through `/v1/completions`
   with `return_token_ids`, and never through text.
2. The end-of-sequence settings of the server are switched off: only the stop ids of a request end it.
3. A change of weights has these steps: pause, update, drop the prefix cache, set the version, resume.
4. A server that comes back after a failure gets its weights and adapters again.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from agentenv.core.errors import EngineError, ModelNotFound
from agentenv.engine.base import ChatEngine, Completion, Engine, Sampling
from agentenv.engine.exact import VERSION_LABEL, exact_completion, room_for, version_ranges
from agentenv.engine.vllm.pool import Server, ServerPool
from agentenv.engine.vllm.probe import ServerReport, probe
from agentenv.engine.weight_files import require_weights, vocab_size

__all__ = ["VLLMServerEngine", "connect"]

_log = logging.getLogger(__name__)


class VLLMServerEngine:
    """Samples from one or several vLLM servers of the same model.

    Args:
        report: report of the probe; it must hold for all servers.
        urls: addresses of the servers, without `/v1`; that of the report if None.
        concurrency: most requests in flight to each server; further requests wait.
        retry_s: seconds for which requests to an unreachable or busy server are retried.
        api_key: key that is sent as a bearer token.
    """

    def __init__(
        self,
        report: ServerReport,
        urls: Sequence[str] | None = None,
        *,
        concurrency: int = 256,
        retry_s: float = 120.0,
        api_key: str | None = None,
    ) -> None:
        self.report = report
        self.name = f"{report.url}/v1"
        self.weights_version = report.weights_version
        self.max_context_tokens = report.max_context_tokens
        self._pool = ServerPool(
            urls or [report.url],
            concurrency=concurrency,
            retry_s=retry_s,
            api_key=api_key,
            restore=self._restore,
        )
        self._remote = report.model_path is None or not Path(report.model_path).exists()
        self._vocab_size = None if report.model_path is None else vocab_size(report.model_path)
        self._adapters: dict[str, str] = {}
        self._weights_path: str | None = None

    @property
    def untrainable_reason(self) -> str:
        """Why the completions of this server must not be trained on; empty if they may be."""
        if self.report.logprobs == "processed":
            return ""
        return (
            f"the server's log-probabilities are {self.report.logprobs}, not at the sampling temperature; "
            "start it with --logprobs-mode processed_logprobs"
        )

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
            EngineUnavailable: No server could be reached in time.
            EngineError: The server refused the request, or returned no exact tokens and logprobs.
        """
        prompt = list(prompt_ids)
        room = room_for(self.name, prompt, sampling.max_tokens, self.max_context_tokens)
        path, body = self._body(prompt, sampling, room, stop_token_ids)
        version = self.weights_version
        try:
            async with asyncio.timeout(deadline_s):
                answer, waited = await self._pool.post(path, body, session_id=session_id)
        except TimeoutError:
            return Completion((), (), "abort")
        try:
            return self._completion(answer, frozenset(stop_token_ids), room, version, waited)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise EngineError(
                f"the answer of {self.name} is not a completion: {type(error).__name__}: {error}"
            ) from error

    async def release(self, session_id: str) -> None:
        """Forget to which server an episode belongs."""
        self._pool.release(session_id)

    async def close(self) -> None:
        """Close the connections; the servers keep running."""
        await self._pool.close()

    async def disconnect(self) -> None:
        """Close the connections of this event loop."""
        await self._pool.close()

    async def load_adapter(self, name: str, path: str | Path, *, version: int | None = None) -> int:
        """Load a LoRA adapter from a directory that the servers can read; it replaces one of the same name.

        Returns:
            The new weights version.

        Raises:
            EngineError: A server has no `/v1/load_lora_adapter`, or refuses the adapter.
        """
        if not self.report.lora:
            raise EngineError(f"{self.name} cannot load adapters: {self.report.missing[-1]}")
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
        async with self._paused():
            await self._pool.post_all("/v1/load_lora_adapter", body)
            self._adapters[name] = str(path)
            return await self._new_version(version)

    async def load_weights(self, path: str | Path, *, version: int | None = None) -> int:
        """Load the full weights from a directory that the servers can read.

        Requests in flight are paused meanwhile and continue with the new weights. The prefix cache is
        dropped, because it holds keys and values of the old weights.

        Returns:
            The new weights version.

        Raises:
            EngineError: A server is not in development mode, or the weights do not fit its model.
        """
        self._need_dev_mode()
        require_weights(path, self.report.model_path, remote=self._remote)
        began = monotonic()
        async with self._paused():
            await self._pool.post_all("/collective_rpc", reload_body(path))
            await self._drop_caches()
            self._weights_path = str(path)
            new = await self._new_version(version)
        _log.info("loaded weights %s from %s in %.2f s", new, path, monotonic() - began)
        return new

    @asynccontextmanager
    async def _paused(self) -> AsyncGenerator[None]:
        """Pause the requests in flight, if the servers can, so that the version of each token is known."""
        if not self.report.dev_mode:
            yield
            return
        try:
            # This is inside the try block: if one server cannot be paused, the others must still be resumed.
            await self._pool.post_all("/pause?mode=keep", {})
            yield
        finally:
            await self._pool.post_all("/resume", {})

    def _need_dev_mode(self) -> None:
        if not self.report.dev_mode:
            raise EngineError(
                f"{self.name} does not allow its weights to be changed",
                remedy="start it with VLLM_SERVER_DEV_MODE=1, on a network that only you can reach",
            )

    async def _drop_caches(self) -> None:
        answers = await self._pool.post_all("/reset_prefix_cache?reset_running_requests=true", {})
        if any(answer.get("success") is False for answer in answers):
            raise EngineError(
                f"{self.name} did not drop the prefix cache of the old weights",
                remedy="restart the server",
            )

    async def _new_version(self, version: int | None) -> int:
        self.weights_version = self.weights_version + 1 if version is None else version
        if self.report.dev_mode:
            label = f"{VERSION_LABEL}{self.weights_version}"
            await self._pool.post_all("/update_weight_version", {"new_version": label})
        return self.weights_version

    async def _restore(self, server: Server) -> None:
        """Load the weights and adapters of the other servers into a server that came back."""
        if self.weights_version and self._weights_path is None and not self._adapters:
            _log.warning(
                "%s came back with its original weights, because version %d was pushed by another process",
                server.url,
                self.weights_version,
            )
            self.weights_version = 0
            return
        served = await self._pool.get(server, "/v1/models")
        names = {entry["id"] for entry in served.get("data", [])}
        if self._weights_path is not None:
            info = await self._pool.get(server, "/weight_info")
            if info.get("weight_version") != f"{VERSION_LABEL}{self.weights_version}":
                await self._pool.post_one(server, "/collective_rpc", reload_body(self._weights_path))
                await self._pool.post_one(server, "/reset_prefix_cache", {})
        for name, path in self._adapters.items():
            if name not in names:
                body = {"lora_name": name, "lora_path": path}
                await self._pool.post_one(server, "/v1/load_lora_adapter", body)
        if self.report.dev_mode and self.weights_version:
            label = f"{VERSION_LABEL}{self.weights_version}"
            await self._pool.post_one(server, "/update_weight_version", {"new_version": label})

    def _body(
        self, prompt: list[int], sampling: Sampling, room: int, stop: Sequence[int]
    ) -> tuple[str, dict[str, Any]]:
        drawn: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": room,
            "logprobs": 0,
            "stop_token_ids": list(stop),
            "ignore_eos": True,
        }
        if sampling.seed is not None:
            drawn["seed"] = sampling.seed
        own = self.report.model
        model = sampling.adapter_or(own) or self.report.base or own
        if self.report.route == "generate":
            return "/inference/v1/generate", {"model": model, "token_ids": prompt, "sampling_params": drawn}
        return "/v1/completions", {"model": model, "prompt": prompt, "return_token_ids": True, **drawn}

    def _completion(
        self, answer: Mapping[str, Any], stop: frozenset[int], room: int, version: int, waited: float
    ) -> Completion:
        choice = answer["choices"][0]
        tokens = tuple(choice["token_ids"])
        if self.report.route == "generate":
            content: list[dict[str, Any]] = choice["logprobs"]["content"] or []
            logprobs = tuple(entry["logprob"] for entry in content)
        else:
            logprobs = tuple(choice["logprobs"]["token_logprobs"])
        spans = [
            (str(span["version"]), span["start"], span["end"]) for span in choice.get("weight_versions") or ()
        ]
        return exact_completion(
            self.name,
            tokens,
            logprobs,
            choice["finish_reason"],
            stop=stop,
            max_tokens=room,
            ranges=version_ranges(spans, len(tokens), version),
            vocab_size=self._vocab_size,
            queue_s=waited,
        )


def reload_body(path: str | Path) -> dict[str, Any]:
    """Return the body of the request upon which the workers of vLLM read weights from a directory."""
    return {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}


def connect(
    url: str,
    *,
    tokenizer: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    concurrency: int = 256,
    retry_s: float = 120.0,
    timeout_s: float = 180.0,
) -> tuple[Engine | ChatEngine, str | None]:
    """Connect to one server, or to several servers whose URLs are separated by commas.

    Returns:
        The engine and the path of its tokenizer. If the server returns no token ids, a chat engine and
        None, after a warning.

    Raises:
        EngineUnavailable: A server does not answer.
        EngineError: The servers differ, or do not have the model.
        ModelNotFound: The tokenizer is not on this machine.
    """
    urls = [part.strip() for part in url.split(",") if part.strip()]
    reports = [probe(part, model=model, api_key=api_key, timeout_s=timeout_s) for part in urls]
    report = reports[0]
    for other in reports[1:]:
        if (other.model, other.route, other.logprobs) != (report.model, report.route, report.logprobs):
            raise EngineError(
                f"{report.url} and {other.url} differ in their model, route or log-probabilities",
                remedy="connect to servers of one model that were started with the same options",
            )
    if report.route == "chat":
        from agentenv.engine.openai_chat import OpenAIChatEngine

        warnings.warn(
            f"{report.url} returns no token ids ({report.detail}), so its episodes can be evaluated but not "
            "trained on",
            stacklevel=3,
        )
        base = f"{report.url}/v1"
        chat = OpenAIChatEngine(report.model, base_url=base, api_key=api_key or "none", name=base)
        return chat, None
    engine = VLLMServerEngine(
        report,
        [other.url for other in reports],
        concurrency=concurrency,
        retry_s=retry_s,
        api_key=api_key,
    )
    for lack in report.missing:
        _log.info("%s lacks %s", report.url, lack)
    return engine, tokenizer or tokenizer_path(report)


def tokenizer_path(report: ServerReport) -> str:
    """Return the path of the server's model on this machine.

    Raises:
        ModelNotFound: The model is not on this machine, so the path of the tokenizer must be passed.
    """
    path = report.model_path
    if path is None or not Path(path).exists():
        raise ModelNotFound(
            f"the tokenizer of {report.model} (loaded by the server from {path!r}) is not on this machine",
            remedy="name a directory that has it with --tokenizer",
        )
    return path
