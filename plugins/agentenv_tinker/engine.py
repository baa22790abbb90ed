"""The engine on a server of the Tinker API: each sampling client is one version of the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

from agentenv.core import EngineUnavailable, UsageError
from agentenv.engine import (
    Completion,
    Decoder,
    Features,
    LoadedModel,
    ModelForm,
    Sampling,
    check_options,
    cut_at_stop,
    exact_completion,
    refuse_grammar,
    room_for,
)
from agentenv.engine.hf import directory_of
from agentenv.render import ChatTokenizer
from agentenv_tinker.service import FORM, Service, parse_model

__all__ = ["TINKER", "TinkerEngine", "load_tokenizer", "open_service"]

LARGEST_SEED = 0x7FFFFFFF
"""SkyRL takes seeds of 31 bits and fails with larger ones."""
TOKENIZER_FILES = ("config.json", "tokenizer*", "special_tokens_map.json", "chat_template*")
"""What is read of a model of the Hub."""
NOT_AT_ONE = (
    "sampled at a temperature other than 1 by a server of the Tinker API, which does not say at which "
    "temperature its log-probabilities are"
)


class TinkerEngine:
    """Samples with a client of the Tinker API; see `agentenv.engine.Engine`.

    Args:
        service: the server.
        decode: the tokenizer, which finds stop strings.
        weights: path of saved weights at the server; empty for the base model.
        max_context_tokens: limit of the model; None asks the server.
    """

    def __init__(
        self,
        service: Service,
        decode: Decoder,
        *,
        weights: str = "",
        max_context_tokens: int | None = None,
    ) -> None:
        self.service, self.name, self._decode = service, service.name, decode
        limit = service.context_length()
        self.max_context_tokens = max_context_tokens or limit
        self.renew: Callable[[], Awaitable[None]] | None = None
        """Calls `use` with another client when a request has failed, if a training can make one."""
        self.use(service.sampler(weights), 0)

    def use(self, client: Any, version: int) -> None:
        """Sample from a new client, whose weights are of a version; requests in flight keep the old one."""
        self._client: Any = client
        self.weights_version = version
        self.failures = 0
        """Requests that failed since the sampling client was made."""
        self._renewing = asyncio.Lock()

    @property
    def features(self) -> Features:
        """The tokens that were computed so far are counted, and what they cost if there are prices."""
        return Features(metrics=self.service.spent.metrics)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
    ) -> Completion:
        """Sample one completion; see `Engine.generate`.

        Raises:
            ContextTooLong: The prompt leaves no room for a token.
            EngineUnavailable: The server did not answer, after the SDK's own retries.
            EngineError: It returned something else than sampled tokens with a log-probability each.
            UsageError: The settings ask for what the API does not have.
        """
        refuse_grammar(self.name, sampling)
        if sampling.min_p or sampling.adapter:
            given = "min_p" if sampling.min_p else f"adapter={sampling.adapter!r}"
            raise UsageError(f"{self.name} cannot sample with {given}", remedy="leave it out")
        from tinker import types

        room = room_for(self.name, prompt_ids, sampling.token_limit, self.max_context_tokens)
        asked = types.SamplingParams(
            max_tokens=room,
            seed=None if sampling.seed is None else sampling.seed & LARGEST_SEED,
            # A request has ids or texts to stop at, never both, so texts are found here.
            stop=list(stop_token_ids),
            temperature=sampling.temperature,
            top_k=sampling.top_k or -1,
            top_p=sampling.top_p,
        )
        prompt = types.ModelInput.from_ints(list(prompt_ids))
        for again in (False, True):
            # Both belong to this request, whatever weights come meanwhile.
            client, version = self._client, self.weights_version
            try:
                async with asyncio.timeout(deadline_s):
                    answer = await _sample(client, prompt, asked)
            except TimeoutError:
                return Completion((), (), "abort")
            except Exception as error:
                self.failures += 1
                failure = self.service.failure("sample", error)
                if again or not isinstance(failure, EngineUnavailable) or not await self._renewed(client):
                    raise failure from error
            else:
                return self._completion(answer, prompt_ids, sampling, stop_token_ids, room, version)
        raise AssertionError  # the second attempt returns or raises

    async def _renewed(self, client: Any) -> bool:
        """Return whether there is another client than the one that failed; the first request gets it made."""
        async with self._renewing:
            if self._client is client and self.renew is not None:
                # If this fails, the requests that wait do not wait as long once more.
                renew, self.renew = self.renew, None
                await renew()
                self.renew = renew
        return self._client is not client

    def _completion(  # noqa: PLR0917 - what was asked and what came
        self,
        answer: Any,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        room: int,
        version: int,
    ) -> Completion:
        (sequence,) = answer.sequences
        tokens, reason = list(sequence.tokens), str(sequence.stop_reason)
        spent = self.service.spent
        spent.prefilled += len(prompt_ids)
        spent.cached += getattr(answer, "prompt_cache_hit_tokens", None) or 0
        spent.sampled += len(tokens)
        logprobs = list(sequence.logprobs or ())
        if sampling.stop and len(logprobs) == len(tokens):
            tokens, found = cut_at_stop(tokens, sampling.stop, self._decode.decode)
            logprobs, reason = logprobs[: len(tokens)], "stop" if found else reason
        made = exact_completion(
            self.name,
            tokens,
            logprobs,
            reason,
            stop=stop_token_ids,
            max_tokens=room,
            stop_strings=sampling.stop,
            ranges=((version, 0, len(tokens)),),
        )
        return made if sampling.temperature in {0, 1} else replace(made, no_supports=NOT_AT_ONE)

    async def release(self, session_id: str) -> None:
        """Do nothing: the server keeps nothing for an episode."""

    async def close(self) -> None:
        """Do nothing: the SDK's session ends with the process."""


async def _sample(client: Any, prompt: Any, asked: Any) -> Any:
    """Await one sample; the SDK returns a future of threads up to 0.25, and later one to await."""
    future = client.sample(prompt=prompt, num_samples=1, sampling_params=asked)
    return await (future if hasattr(future, "__await__") else asyncio.wrap_future(future))


def open_service(model: str, options: dict[str, Any]) -> Service:
    """Connect to the server that a model string names, with the options that are the server's."""
    name, url = parse_model(model)
    return Service(name, url, prices=options.pop("prices", None))


def load_tokenizer(model: str) -> ChatTokenizer:
    """Return the tokenizer of a base model: from its directory, or from the Hub without its weights."""
    return ChatTokenizer.load(directory_of(model, *TOKENIZER_FILES))


def _load(rest: str, tokenizer: str | None, options: dict[str, Any]) -> LoadedModel:
    service = open_service(rest, options)
    codec = ChatTokenizer.load(tokenizer) if tokenizer else load_tokenizer(service.model)
    check_options(TinkerEngine, service.name, options)
    return LoadedModel(TinkerEngine(service, codec, **options), codec)


def _learner() -> ModuleType:
    return import_module("agentenv_tinker.training")  # here, because an evaluation needs no torch


TINKER = ModelForm(_load, FORM, lambda model: (model, model), _learner)
