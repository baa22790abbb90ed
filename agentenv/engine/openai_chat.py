"""An engine for OpenAI-compatible chat APIs, for evaluation only, because they return no exact tokens.

1. Tools go through the API. If a server refuses them, this request and all later ones use the text
   protocol.
2. A parameter that a model refuses, such as temperature on reasoning models, is left out from then
   on, and a warning is logged once.
3. The SDK retries after rate limits, connection errors and server errors, and honours `Retry-After`;
   a deadline ends the waiting.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from agentenv.core.errors import ContextTooLong, DependencyMissing, EngineError, EngineUnavailable, UsageError
from agentenv.core.messages import JsonValue, Message, ToolCallMessage
from agentenv.engine.base import ChatCompletion, FinishReason, Sampling, Usage
from agentenv.engine.vllm.pool import message_of

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["OpenAIChatEngine"]

OFFICIAL = "api.openai.com"
FINISHES: dict[str | None, FinishReason] = {
    "stop": "stop",
    "tool_calls": "stop",
    "length": "length",
}
PASSING = {
    "429",
    "500",
    "502",
    "503",
    "504",
    "529",
    "rate_limit_exceeded",
    "server_error",
    "overloaded_error",
}
"""Codes and types of errors after which a retry may succeed; they may also occur within a stream."""
MAY_BE_LEFT_OUT = ("temperature", "top_p", "seed", "stream_options", "top_k", "min_p")
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)

_log = logging.getLogger(__name__)


class OpenAIChatEngine:
    """Chat with a model behind an OpenAI-compatible API.

    Args:
        model: name of the model at the API.
        base_url: address of the API; OPENAI_BASE_URL if None, or else that of OpenAI.
        api_key: key for the API; OPENAI_API_KEY if None.
        name: the model string, which is stored in records.
        stream: read the answer as a stream; needed for proxies that cut off long silent answers.
        text_tools: describe tools in the system message and not through the API.
        max_retries: how often the SDK retries each request.
        timeout_s: time limit of each attempt in seconds.
        concurrency: most requests in flight at the same time; further requests wait.
        max_context_tokens: context limit of the model, if it is known.
        price_in: price of a million prompt tokens, for APIs that report no cost.
        price_out: price of a million completion tokens.
        extra: further parameters, sent unchanged with each request.

    Raises:
        UsageError: There is no API key.
        DependencyMissing: The openai package is not installed.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        name: str | None = None,
        stream: bool = False,
        text_tools: bool = False,
        max_retries: int = 6,
        timeout_s: float = 600.0,
        concurrency: int = 32,
        max_context_tokens: int | None = None,
        price_in: float | None = None,
        price_out: float | None = None,
        extra: Mapping[str, JsonValue] | None = None,
    ) -> None:
        address = base_url or os.environ.get("OPENAI_BASE_URL") or f"https://{OFFICIAL}/v1"
        if not (api_key or os.environ.get("OPENAI_API_KEY")):
            if OFFICIAL in address:
                raise UsageError(f"openai:{model} needs a key", remedy="set OPENAI_API_KEY, or pass api_key")
            api_key = "none"
        self.name = name or f"openai:{model}"
        self.max_context_tokens = max_context_tokens
        self._model = model
        self._address = address
        self._key = api_key
        self._stream = stream
        self._text_tools = text_tools
        self._max_retries = max_retries
        self._timeout_s = timeout_s
        self._prices = (price_in, price_out)
        self._extra = dict(extra or {})
        self._refused: set[str] = set()
        self._concurrency = concurrency
        self._room = asyncio.Semaphore(concurrency)
        self._client: AsyncOpenAI | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JsonValue]],
        sampling: Sampling,
        *,
        deadline_s: float | None = None,
    ) -> ChatCompletion:
        """Return the answer to a conversation; see `agentenv.engine.base.ChatEngine`.

        Raises:
            ContextTooLong: The API says that the conversation does not fit.
            EngineUnavailable: The API could not be reached, or was overloaded.
            EngineError: The API refused the request, or returned no usable answer.
        """
        if sampling.adapter is not None:
            raise UsageError(
                f"{self.name} takes no adapter, but got {sampling.adapter!r}", remedy="leave adapter out"
            )
        self._settle()
        try:
            async with asyncio.timeout(deadline_s), self._room:
                return await self._ask(messages, tools, sampling)
        except TimeoutError:
            return ChatCompletion({"role": "assistant", "content": ""}, Usage(), "abort")

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _ask(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, JsonValue]], sampling: Sampling
    ) -> ChatCompletion:
        openai = openai_module()
        while True:
            body = self._body(messages, tools, sampling)
            try:
                return self._completion(await self._send(body))
            except openai.BadRequestError as error:
                if not self._adapt(error.message, body):
                    raise refused(self.name, error.message) from error
            except (openai.APIConnectionError, openai.RateLimitError, openai.InternalServerError) as error:
                raise EngineUnavailable(f"{self.name}: {type(error).__name__}: {error.message}") from error
            except openai.APIError as error:
                wrong = EngineUnavailable if passing(error.body) else EngineError
                raise wrong(f"{self.name}: {type(error).__name__}: {error.message}") from error
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise EngineError(
                    f"{self.name} did not answer with a chat completion: {type(error).__name__}: {error}"
                ) from error

    async def _send(self, body: dict[str, Any]) -> Any:
        completions: Any = self._connected().chat.completions
        if not self._stream:
            return await completions.create(**body)
        return await joined(await completions.create(**body, stream=True))

    def _settle(self) -> None:
        """Start afresh on a new event loop: connections and waiting requests belong to the old one."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._client = None
            self._room = asyncio.Semaphore(self._concurrency)

    def _connected(self) -> AsyncOpenAI:
        if self._client is None:
            self._client = openai_module().AsyncOpenAI(
                base_url=self._address,
                api_key=self._key,
                max_retries=self._max_retries,
                timeout=self._timeout_s,
            )
        return cast("AsyncOpenAI", self._client)

    def _body(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, JsonValue]], sampling: Sampling
    ) -> dict[str, Any]:
        official = OFFICIAL in self._address
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "temperature": sampling.temperature,
            "max_completion_tokens" if official else "max_tokens": sampling.max_tokens,
        }
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        beyond = {"top_k": sampling.top_k, "min_p": sampling.min_p}
        extra = {**{key: value for key, value in beyond.items() if value}, **self._extra}
        if tools and self._text_tools:
            body["messages"] = in_text(messages, tools)
        elif tools:
            body["tools"] = list(tools)
        if self._stream:
            body["stream_options"] = {"include_usage": True}
        for name in self._refused:
            body.pop(name, None)
            extra.pop(name, None)
        return {**body, "extra_body": extra} if extra else body

    def _adapt(self, reason: str, body: Mapping[str, Any]) -> bool:
        """Change later requests so that the API may accept them; return False if nothing can be changed."""
        lower = reason.lower()
        for name in MAY_BE_LEFT_OUT:
            sent = name in body or name in body.get("extra_body", {})
            if sent and re.search(rf"\b{name}\b", lower):
                self._refused.add(name)
                _log.warning("%s refuses %r (%s); it is left out from now on", self.name, name, reason)
                return True
        if "tools" in body and re.search(r"\btools?\b|function.?call", lower):
            self._text_tools = True
            _log.warning(
                "%s takes no tools (%s); they are described in the system message", self.name, reason
            )
            return True
        return False

    def _completion(self, answer: Any) -> ChatCompletion:
        if not answer.choices:
            # Some proxies answer with status 200 and the error of the server behind them.
            body: Any = getattr(answer, "error", None)
            wrong = EngineUnavailable if passing(body) else EngineError
            reason = message_of({"error": body}) if body else "no reason given"
            raise wrong(f"{self.name} answered without a choice: {reason}")
        choice = answer.choices[0]
        if choice.finish_reason not in FINISHES:
            raise EngineError(
                f"{self.name} ended the answer with the unknown finish reason {choice.finish_reason!r}"
            )
        answered = choice.message
        text = answered.content or getattr(answered, "refusal", None) or ""
        message: Message = {"role": "assistant", "content": text}
        if thought := thinking(answered):
            message["reasoning_content"] = thought
        calls = [call_message(call, index) for index, call in enumerate(answered.tool_calls or ())]
        if self._text_tools and not calls:
            message["content"], calls = calls_in(text)
        if calls:
            message["tool_calls"] = calls
        return ChatCompletion(message, self._usage(answer.usage), FINISHES[choice.finish_reason])

    def _usage(self, usage: Any) -> Usage:
        if usage is None:
            return Usage()
        cost = getattr(usage, "cost", None)
        price_in, price_out = self._prices
        if cost is None and price_in is not None and price_out is not None:
            cost = (usage.prompt_tokens * price_in + usage.completion_tokens * price_out) / 1e6
        return Usage(
            prompt_tokens=usage.prompt_tokens or 0,
            completion_tokens=usage.completion_tokens or 0,
            reasoning_tokens=detail(usage, "completion_tokens_details", "reasoning_tokens"),
            cached_tokens=detail(usage, "prompt_tokens_details", "cached_tokens"),
            cost_usd=cost,
        )


def openai_module() -> Any:
    """Return the openai package.

    Raises:
        DependencyMissing: The openai package is not installed.
    """
    try:
        import openai
    except ImportError:
        raise DependencyMissing(
            "openai: models need the openai package", remedy="pip install openai"
        ) from None
    return openai


def refused(name: str, said: str) -> EngineError:
    """Return the error for a request that the API refused."""
    if "context length" in said.lower() or "context_length" in said.lower():
        return ContextTooLong(f"{name}: {said}")
    return EngineError(f"{name} refused the request: {said}")


def passing(body: object) -> bool:
    """Return True if the error of an API means that a retry may succeed."""
    said: Mapping[str, object] = cast("Any", body) if isinstance(body, Mapping) else {}
    return any(str(said.get(name)) in PASSING for name in ("code", "type"))


def thinking(said: Any) -> str:
    """Return the reasoning text of a message or of a piece of one; APIs have two names for it."""
    for name in ("reasoning_content", "reasoning"):
        text = getattr(said, name, None)
        if isinstance(text, str) and text:
            return text
    return ""


def detail(usage: Any, group: str, field: str) -> int:
    """Return a count from the details of a usage, or 0 if the API leaves it out."""
    return getattr(getattr(usage, group, None), field, None) or 0


def call_message(call: Any, index: int) -> ToolCallMessage:
    """Return a tool call of the API as a message entry; a call without id gets one."""
    function = call.function
    return {
        "id": call.id or f"call_{index}",
        "type": "function",
        "function": {"name": function.name or "", "arguments": function.arguments or ""},
    }


def in_text(messages: Sequence[Message], tools: Sequence[Mapping[str, JsonValue]]) -> list[Any]:
    """Return a conversation in which tools, calls and results are written as text."""
    from agentenv.render.text_protocol import TextProtocol

    plain = [dict(message) for message in messages]
    return TextProtocol().plain(plain, tools, system_role=True, opening=True)


def calls_in(text: str) -> tuple[str, list[ToolCallMessage]]:
    """Return a text without its valid `<tool_call>` blocks, and the calls from these blocks."""
    calls: list[ToolCallMessage] = []

    def read(match: re.Match[str]) -> str:
        try:
            written = json.loads(match.group(1))
            name, arguments = str(written["name"]), json.dumps(written.get("arguments", {}))
        except (ValueError, KeyError):
            return match.group(0)
        calls.append(
            {
                "id": f"call_{len(calls)}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )
        return ""

    return CALL.sub(read, text).strip(), calls


async def joined(chunks: AsyncIterator[Any]) -> Any:
    """Join the chunks of a streamed answer into one answer of the usual form."""
    content: list[str] = []
    thought: list[str] = []
    calls: dict[int, SimpleNamespace] = {}
    finish: str | None = None
    usage: Any = None
    async for chunk in chunks:
        usage = getattr(chunk, "usage", None) or usage
        for choice in chunk.choices or ():
            finish = choice.finish_reason or finish
            content.append(choice.delta.content or "")
            thought.append(thinking(choice.delta))
            for part in choice.delta.tool_calls or ():
                add_call_part(calls, part)
    if finish is None:
        raise ValueError("the stream ended in the middle of the answer")
    message = SimpleNamespace(
        content="".join(content),
        reasoning_content="".join(thought),
        tool_calls=[calls[index] for index in sorted(calls)],
    )
    return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason=finish)], usage=usage)


def add_call_part(calls: dict[int, SimpleNamespace], part: Any) -> None:
    """Add a streamed piece of a tool call to the pieces before it."""
    call = calls.setdefault(
        part.index, SimpleNamespace(id="", function=SimpleNamespace(name="", arguments=""))
    )
    call.id = call.id or part.id or ""
    if part.function is not None:
        call.function.name += part.function.name or ""
        call.function.arguments += part.function.arguments or ""
