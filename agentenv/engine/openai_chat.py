"""An engine for OpenAI-compatible chat APIs, for evaluation only, because they return no exact tokens.

1. Tools go through the API. If a server refuses them, this request and all later ones use the text
   protocol.
2. A parameter that a model refuses, such as temperature on reasoning models, is left out from then
   on, and a warning is logged once. What the server has accepted once is never given up again: an
   error is then about the one conversation. Stop strings are never left out, because they decide what
   the answer is: an API that does not take them is an error.
3. Reasoning text goes back to the server with the history, unless the server refuses it.
4. Requests are retried after rate limits, connection errors and server errors, and `Retry-After` is
   honoured; a deadline ends the waiting.
5. The form that a reply must have is asked for by `tool_choice`, `response_format` and
   `parallel_tool_calls`. What the API makes of them is for the caller to look at.
6. Images that tools returned are sent in a message of the user, because the API takes them nowhere else.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from agentenv.core.errors import ContextTooLong, EngineError, EngineUnavailable, UsageError
from agentenv.core.messages import JsonValue, Message
from agentenv.core.visible import logger
from agentenv.engine.base import ChatCompletion, Features, Sampling, Usage, refuse_grammar
from agentenv.engine.chat_answer import fields_of_form, finish_of, message_in, with_images_of_users
from agentenv.engine.chat_client import ChatClient, ChatFailure, Key
from agentenv.engine.chat_refusal import REASONING, TOOLS, features_of, refused_feature, words_of
from agentenv.engine.vllm.client import message_of, require_no_password
from agentenv.render.base import ReplyForm

__all__ = ["OpenAIChatEngine"]

OFFICIAL = "api.openai.com"
BAD_REQUEST, TOO_LARGE, TOO_MANY, SERVER_ERROR = 400, 413, 429, 500
REFUSED = {BAD_REQUEST, 422}
"""Statuses of requests of which a part may be refused."""
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
MOST = 2.0**53
"""Beyond this no count or price is taken as one."""
TOO_LONG_CODES = ("context_length_exceeded", "exceed_context_size_error", "string_above_max_length")
"""Codes and types of errors of conversations that are too long: of OpenAI and of llama.cpp."""
TOO_LONG = re.compile(
    r"context[ _](length|window|size|limit)|maximum (prompt|input|model) length"
    r"|(prompt|input) is too long|(prompt|input) (token count|length)\b.*\bexceed"
    r"|inputs` tokens \+ `max_new_tokens|range of input length|too many tokens:",
    re.IGNORECASE | re.DOTALL,
)
"""How servers say it: OpenAI, vLLM, SGLang, Mistral, llama.cpp; xAI; Anthropic and Bedrock; Gemini; TGI;
DashScope; Cohere."""

_log = logger(__name__)


class OpenAIChatEngine:
    """Chat with a model behind an OpenAI-compatible API.

    Args:
        model: name of the model at the API.
        base_url: address of the API, which may have a query; OPENAI_BASE_URL if None, or else that of OpenAI.
        api_key: key for the API, or a function that returns the token that is valid now; OPENAI_API_KEY if
            None. An empty text sends no key.
        headers: further headers of each request, for APIs that want a key or a version there.
        name: the model string, which is stored in records.
        stream: read the answer as a stream; needed for proxies that cut off long silent answers.
        text_tools: describe tools in the system message and not through the API.
        max_retries: how often a request is tried again.
        timeout_s: longest time in seconds in which nothing comes from the API.
        concurrency: most requests in flight at the same time; further requests wait.
        max_context_tokens: context limit of the model, if it is known.
        price_in: price of a million prompt tokens, for APIs that report no cost.
        price_out: price of a million completion tokens.
        extra: further parameters, sent unchanged with each request.

    Raises:
        UsageError: The API of OpenAI needs a key, and there is none, or the address holds a password.
    """

    features = Features(forms=True)

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: Key | None = None,
        headers: Mapping[str, str] | None = None,
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
        require_no_password(address)
        if headers is not None and not isinstance(headers, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                "headers must be a table of texts", remedy='write engine.headers={"NAME" = "VALUE"}'
            )
        if api_key is None:
            api_key = os.environ.get("OPENAI_API_KEY", "")
        if not (api_key or headers) and OFFICIAL in address:
            raise UsageError(f"openai:{model} needs a key", remedy="set OPENAI_API_KEY, or pass api_key")
        self.name = name or f"openai:{model}"
        self.max_context_tokens = max_context_tokens
        self._model = model
        self._address = address
        self._key = api_key
        self._headers = dict(headers or {})
        self._stream = stream
        self._text_tools = text_tools
        self._max_retries = max_retries
        self._timeout_s = timeout_s
        self._prices = (price_in, price_out)
        self._extra = dict(extra or {})
        self._refused: set[str] = set()
        self._accepted: set[str] = set()
        self._concurrency = concurrency
        self._room = asyncio.Semaphore(concurrency)
        self._client: ChatClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JsonValue]],
        sampling: Sampling,
        *,
        deadline_s: float | None = None,
        form: ReplyForm | None = None,
    ) -> ChatCompletion:
        """Return the answer to a conversation; see `agentenv.engine.base.ChatEngine`.

        Args:
            messages: the conversation.
            tools: schemas of the tools.
            sampling: the sampling settings.
            deadline_s: seconds after which the request is given up.
            form: what the API is asked to make the reply be; None if it may be anything.

        Raises:
            ContextTooLong: The API says that the conversation does not fit.
            EngineUnavailable: The API could not be reached, or was overloaded.
            EngineError: The API refused the request, or returned no usable answer.
        """
        refuse_grammar(self.name, sampling)
        if sampling.adapter:
            raise UsageError(
                f"{self.name} takes no adapter, but got {sampling.adapter!r}", remedy="leave adapter out"
            )
        await self._settle()
        try:
            async with asyncio.timeout(deadline_s), self._room:
                return await self._ask(messages, tools, sampling, form)
        except TimeoutError:
            return ChatCompletion({"role": "assistant", "content": ""}, Usage(), "abort")

    async def close(self) -> None:
        """Close the connections, unless they belong to another event loop, which may have ended."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.close()

    async def _ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JsonValue]],
        sampling: Sampling,
        form: ReplyForm | None,
    ) -> ChatCompletion:
        client = self._connected()
        while True:
            body = self._body(messages, tools, sampling, form)
            try:
                answer = await client.send(body, stream=self._stream)
                self._accepted.update(features_of(body))
                return self._completion(answer)
            except ChatFailure as error:
                if too_long(error) or not (error.status_code in REFUSED and self._adapt(error, body)):
                    raise error_of(self.name, error) from error
            except EOFError as error:
                raise EngineUnavailable(f"{self.name}: {error}") from error
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise EngineError(
                    f"{self.name} did not answer with a chat completion: {type(error).__name__}: {error}"
                ) from error

    async def _settle(self) -> None:
        """Start afresh on a new event loop: connections and waiting requests belong to the old one."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        client, before = self._client, self._loop
        self._loop, self._client = loop, None
        self._room = asyncio.Semaphore(self._concurrency)
        if client is not None and before is not None and before.is_closed():
            with suppress(RuntimeError):
                await client.close()

    def _connected(self) -> ChatClient:
        if self._client is None:
            self._client = ChatClient(
                self._address,
                self._key,
                headers=self._headers,
                max_retries=self._max_retries,
                timeout_s=self._timeout_s,
            )
        return self._client

    def _body(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JsonValue]],
        sampling: Sampling,
        form: ReplyForm | None = None,
    ) -> dict[str, Any]:
        official = OFFICIAL in self._address
        messages = with_images_of_users(messages)
        if REASONING in self._refused:
            messages = [without_reasoning(message) for message in messages]
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "temperature": sampling.temperature,
            "max_completion_tokens" if official else "max_tokens": sampling.token_limit,
        }
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        beyond = {"top_k": sampling.top_k, "min_p": sampling.min_p}
        extra = {**{key: value for key, value in beyond.items() if value}, **self._extra}
        if tools and self._text_tools:
            body["messages"] = in_text(messages, tools)
        elif tools:
            body["tools"] = list(tools)
        if form is not None:
            body |= fields_of_form(form, body.get("tools", []))
        if self._stream:
            body["stream_options"] = {"include_usage": True}
        body |= extra
        for name in self._refused:
            body.pop(name, None)
        return body

    def _adapt(self, error: ChatFailure, body: Mapping[str, Any]) -> bool:
        """Change later requests so that the API may accept them; return False if nothing can be changed."""
        name = refused_feature(error, features_of(body) - self._accepted)
        if not name:
            return False
        if name == TOOLS:
            self._text_tools = True
            how = "they are described in the system message"
        else:
            self._refused.add(name)
            how = "it is left out from now on"
        _log.warning("%s refuses %r (%s); %s", self.name, name, words_of(error), how)
        return True

    def _completion(self, answer: Any) -> ChatCompletion:
        if not answer.get("choices"):
            # Some proxies answer with status 200 and the error of the server behind them.
            body: Any = answer.get("error")
            wrong = EngineUnavailable if passing(body) else EngineError
            reason = message_of({"error": body}) if body else "no reason given"
            if TOO_LONG.search(reason):
                raise ContextTooLong(f"{self.name}: {reason}")
            raise wrong(f"{self.name} answered without a choice: {reason}")
        choice = answer["choices"][0]
        finish = choice.get("finish_reason")
        if finish == "error":
            raise EngineUnavailable(f"{self.name} broke off its answer with the finish reason 'error'")
        message = message_in(choice["message"], text_tools=self._text_tools)
        return ChatCompletion(message, self._usage(answer.get("usage")), finish_of(finish, self.name))

    def _usage(self, usage: Any) -> Usage:
        if not isinstance(usage, Mapping):
            return Usage()
        usage = cast("Mapping[str, Any]", usage)
        cost = number(usage.get("cost"))
        num_prompt, num_completion = count(usage, "prompt_tokens"), count(usage, "completion_tokens")
        price_in, price_out = self._prices
        if cost is None and price_in is not None and price_out is not None:
            cost = (num_prompt * price_in + num_completion * price_out) / 1e6
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            reasoning_tokens=detail(usage, "completion_tokens_details", "reasoning_tokens"),
            cached_tokens=detail(usage, "prompt_tokens_details", "cached_tokens"),
            cost_usd=cost,
        )


def error_of(name: str, error: ChatFailure) -> EngineError:
    """Return our error for a failure of an API."""
    if too_long(error):
        return ContextTooLong(f"{name}: {words_of(error)}")
    status = error.status_code
    if status == BAD_REQUEST:
        return EngineError(f"{name} refused the request: {words_of(error)}")
    later = status is not None and (status == TOO_MANY or status >= SERVER_ERROR)
    wrong = EngineUnavailable if later or not error.reached or passing(error.body) else EngineError
    return wrong(f"{name}: {words_of(error)}")


def too_long(error: ChatFailure) -> bool:
    """Return True if an API refused a request because the conversation does not fit into the context."""
    status = error.status_code
    if status == TOO_LARGE or error.code in TOO_LONG_CODES or error.type in TOO_LONG_CODES:
        return True
    # A rate limit may count the tokens of a minute, in words like those of a context limit.
    return status != TOO_MANY and TOO_LONG.search(words_of(error)) is not None


def passing(body: object) -> bool:
    """Return True if the error of an API means that a retry may succeed."""
    said: Mapping[str, object] = cast("Any", body) if isinstance(body, Mapping) else {}
    return any(str(said.get(name)) in PASSING for name in ("code", "type"))


def without_reasoning(message: Message) -> Message:
    """Return a message without its reasoning text."""
    return cast("Message", {key: value for key, value in message.items() if key != REASONING})


def count(usage: Mapping[str, Any], field: str) -> int:
    """Return a count of a usage, or 0 if the API gives none that can be true."""
    return int(number(usage.get(field)) or 0)


def number(said: object) -> float | None:
    """Return a number of an API; None for what no count or price is, such as NaN, which would spoil sums."""
    return said if isinstance(said, (int, float)) and 0 <= said <= MOST else None


def detail(usage: Mapping[str, Any], group: str, field: str) -> int:
    """Return a count from the details of a usage, or 0 if the API leaves it out."""
    details = usage.get(group)
    return count(cast("Mapping[str, Any]", details), field) if isinstance(details, Mapping) else 0


def in_text(messages: Sequence[Message], tools: Sequence[Mapping[str, JsonValue]]) -> list[Any]:
    """Return a conversation in which tools, calls and results are written as text."""
    from agentenv.render.text_protocol import TextProtocol

    plain = [dict(message) for message in messages]
    return TextProtocol().plain(plain, tools, system_role=True, opening=True)
