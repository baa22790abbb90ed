"""An engine for the models that pydantic-ai speaks to; for evaluation only, because they return no tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from agentenv.core import (
    ContextTooLong,
    DependencyMissing,
    EngineError,
    EngineUnavailable,
    JsonValue,
    Message,
    UsageError,
)
from agentenv.engine import (
    ChatCompletion,
    ChatEngine,
    FinishReason,
    LoadedModel,
    ModelForm,
    Sampling,
    Usage,
    check_answers,
    check_options,
)
from agentenv_providers.openai.client import Pace, Patience

__all__ = ["ProviderEngine"]

FILTERS = ("content_filter", "ResponsibleAIPolicy", "content_policy")
"""How providers name a filter's refusal."""
UNREAD_CALL = "the tool call could not be read; write one valid call, or answer in text"


class ProviderEngine(ChatEngine):
    """Chat with a model of a provider that pydantic-ai knows.

    Args:
        provider: name of the provider, such as `anthropic`.
        model: name of the model there.
        api_key: key for the provider; its own environment variable if None, such as ANTHROPIC_API_KEY.
        base_url: address in place of the provider's own.
        provider_options: further arguments of pydantic-ai's provider, such as `region_name` of Bedrock.
        settings: further settings of pydantic-ai for each request, such as `{"thinking": "high"}`.
        leave_out: names of settings that are never sent, such as "temperature".
        retry_s: seconds for which a request is tried again; at a limit of rate they begin anew with each
            answer that any request gets.
        timeout_s: longest time in seconds of a request.
        concurrency: most requests in flight at the same time; further requests wait.
        requests_per_minute: most requests that are begun in a minute; None for no limit.
        max_context_tokens: context limit of the model, if it is known.

    Raises:
        DependencyMissing: pydantic-ai or the provider's package is not installed.
        UsageError: pydantic-ai knows no such provider, or there is no key.
    """

    def __init__(
        self,
        provider: str,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        provider_options: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        leave_out: Sequence[str] = (),
        retry_s: float = 300.0,
        timeout_s: float = 600.0,
        concurrency: int = 32,
        requests_per_minute: float | None = None,
        max_context_tokens: int | None = None,
    ) -> None:
        self.name = f"{provider}:{model}"
        self.max_context_tokens = max_context_tokens
        options = {"api_key": api_key, "base_url": base_url, **(provider_options or {})}
        self._open = partial(_open, provider, model, {k: v for k, v in options.items() if v is not None})
        self._model = self._open()
        self.address = str(getattr(self._model, "base_url", None) or "")
        self._settings = {"request_timeout": timeout_s, **(settings or {})}
        self._leave_out = {leave_out} if isinstance(leave_out, str) else set(leave_out)
        self._patience = Patience(retry_s)
        self._pace = Pace(requests_per_minute)
        self._concurrency = concurrency
        self._room = asyncio.Semaphore(concurrency)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JsonValue]],
        sampling: Sampling,
        *,
        deadline_s: float | None = None,
    ) -> ChatCompletion:
        """Return the answer to a conversation; see `agentenv.engine.ChatEngine`.

        Raises:
            ContextTooLong: The provider says that the conversation does not fit.
            EngineUnavailable: The provider could not be reached, or was overloaded.
            EngineError: The provider refused the request.
        """
        if sampling.adapter or sampling.grammar:
            raise UsageError(f"{self.name} takes neither an adapter nor a grammar", remedy="leave them out")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # connections and waiting requests belong to the loop before
            self._model = self._open() if self._loop is not None else self._model
            self._loop, self._room = loop, asyncio.Semaphore(self._concurrency)
            await self._model.__aenter__()
        try:
            async with asyncio.timeout(deadline_s), self._room:
                return await self._ask(messages, tools, sampling)
        except TimeoutError:
            return ChatCompletion({"role": "assistant", "content": ""}, Usage(), "abort")

    async def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        if self._loop is asyncio.get_running_loop():
            await self._model.__aexit__(None, None, None)
            self._model, self._loop = self._open(), None

    async def _ask(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, JsonValue]], sampling: Sampling
    ) -> ChatCompletion:
        from pydantic_ai.direct import model_request
        from pydantic_ai.exceptions import AgentRunError, ModelAPIError, UserError
        from pydantic_ai.models import ModelRequestParameters

        from agentenv_providers.messages import definitions, history

        told = history(messages, self.name)
        asked = ModelRequestParameters(function_tools=definitions(tools))
        settings: Any = {**self._sampled(sampling), **self._settings}
        began, attempt = time.monotonic(), 0
        while True:
            await self._pace.take()
            try:
                said = await model_request(
                    self._model, told, model_settings=settings, model_request_parameters=asked
                )
                self._patience.answered()
                return self._completion(said)
            except ModelAPIError as error:
                named = f"{error.provider_error_code} {error.provider_error_type} {error.body}"
                if any(word in named for word in FILTERS):
                    return ChatCompletion({"role": "assistant", "content": ""}, Usage(), "content_filter")
                pause = self._pause(error, began, attempt)
                if pause is None:
                    raise self._failure(error) from error
                await asyncio.sleep(pause)
                attempt += 1
            except (AgentRunError, UserError, ValueError) as error:
                raise EngineError(f"{self.name}: {type(error).__name__}: {error}") from error

    def _sampled(self, sampling: Sampling) -> dict[str, Any]:
        """Return the sampling settings in pydantic-ai's words."""
        settings = {
            "max_tokens": sampling.token_limit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.top_p < 1 else None,
            "top_k": sampling.top_k or None,
            "seed": None if sampling.seed is None else sampling.seed % 2**31,
            "stop_sequences": list(sampling.stop) or None,
        }
        return {k: v for k, v in settings.items() if v is not None and k not in self._leave_out}

    def _pause(self, error: Any, began: float, attempt: int) -> float | None:
        """Return the seconds to wait before a request is tried again; None if it is not."""
        if not isinstance(self._failure(error), EngineUnavailable):
            return None
        rate = "RateLimit" in type(error).__name__
        return self._patience.pause(began, attempt, rate=rate, asked=error.retry_after)

    def _failure(self, error: Any) -> EngineError:
        from pydantic_ai import exceptions as known

        words = f"{self.name}: {error}"
        if isinstance(error, known.ModelContextWindowExceededError):
            return ContextTooLong(words)
        if isinstance(error, known.ModelQuotaExceededError):
            return EngineError(words, remedy="wait until the quota is renewed, and resume the run then")
        final = isinstance(error, known.ModelRequestRejectedError)
        return (EngineError if final else EngineUnavailable)(words)

    def _completion(self, said: Any) -> ChatCompletion:
        from agentenv_providers.messages import message_of

        message = message_of(said, self.name)
        finish, reason = said.finish_reason, str((said.provider_details or {}).get("finish_reason"))
        malformed = finish == "error" and "CALL" in reason.upper()
        if finish == "error" and not malformed:
            raise EngineUnavailable(f"{self.name} broke off its answer: {reason}")
        known: dict[str | None, FinishReason] = {"length": "length", "content_filter": "content_filter"}
        usage = said.usage
        thought = usage.details.get("reasoning_tokens", usage.details.get("thoughts_tokens", 0))
        counted = Usage(
            prompt_tokens=usage.input_tokens,
            completion_tokens=usage.output_tokens,
            reasoning_tokens=thought,
            cached_tokens=usage.cache_read_tokens,
            cost_usd=_price(said),
        )
        return ChatCompletion(message, counted, known.get(finish, "stop"), UNREAD_CALL if malformed else "")


def _price(said: Any) -> float | None:
    """Return what a response cost; None where pydantic's table of prices has no such model."""
    with suppress(AssertionError, LookupError, ValueError):
        return float(said.cost().total_price)
    return None


def _open(provider: str, model: str, options: Mapping[str, Any]) -> Any:
    DependencyMissing.require("pydantic_ai", extra="providers", purpose=f"{provider}: models")
    from pydantic_ai.exceptions import UserError
    from pydantic_ai.models import infer_model
    from pydantic_ai.providers import infer_provider_class

    def opened(name: str) -> Any:
        return infer_provider_class(name)(**options)

    try:
        return infer_model(f"{provider}:{model}", provider_factory=opened)
    except ImportError as error:
        raise DependencyMissing.of(str(error), "providers", purpose=f"{provider}: models") from error
    except (UserError, TypeError, ValueError) as error:  # no key, an unknown option, an unknown provider
        raise UsageError(f"{provider}:{model} cannot be opened: {error}") from error


def _load(provider: str, rest: str, tokenizer: str | None, options: dict[str, Any]) -> LoadedModel:
    if tokenizer is not None:
        raise UsageError(f"{provider}: models work on text and take no tokenizer", remedy="leave it out")
    if not provider:
        provider, _, rest = rest.partition(":")
    check_options(cast("Any", ProviderEngine), f"{provider}:{rest}", options)
    engine = ProviderEngine(provider, rest, **options)
    check_answers(f"{engine.name} at {engine.address}", engine.address)
    return LoadedModel(engine, None)


ANTHROPIC = ModelForm(partial(_load, "anthropic"), "anthropic:NAME", key="ANTHROPIC_API_KEY")
BEDROCK = ModelForm(partial(_load, "bedrock"), "bedrock:NAME", key="AWS_BEARER_TOKEN_BEDROCK")
GOOGLE = ModelForm(partial(_load, "google"), "google:NAME", key="GOOGLE_API_KEY")
GOOGLE_CLOUD = ModelForm(partial(_load, "google-cloud"), "google-cloud:NAME")
GROQ = ModelForm(partial(_load, "groq"), "groq:NAME", key="GROQ_API_KEY")
MISTRAL = ModelForm(partial(_load, "mistral"), "mistral:NAME", key="MISTRAL_API_KEY")
PYDANTIC = ModelForm(partial(_load, ""), "pydantic:PROVIDER:NAME")
