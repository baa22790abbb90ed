"""An engine for OpenAI-compatible chat APIs, for evaluation only, because they return no exact tokens.

1. Whatever an API answers becomes a whole reply before anybody sees it (`chat_reply`), or an error in words.
2. Tools go through the API. If a server refuses them, this request and all later ones use the text protocol.
3. A parameter that a model refuses, such as temperature on reasoning models, is left out from then on, and a
   warning is logged once. What was accepted once is left out of the one request only, and tools are never
   given up then. Where an API takes no stop strings, this engine cuts the text.
4. What the API said beside the text, such as reasoning and signatures, goes back to it with the history.
5. Requests are tried again after rate limits, connection errors and server errors; see `chat_client`.
6. A call that the API could not read is the model's mistake, and what a filter withheld is an outcome: both
   are answers, and no failures of the engine.
7. The form that a reply must have is asked for by `tool_choice`, `response_format` and
   `parallel_tool_calls`. What the API makes of them is for the caller to look at.
8. Images that tools returned are sent in a message of the user, because the API takes them nowhere else.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from agentenv.core import (
    EngineError,
    EngineUnavailable,
    JsonValue,
    Message,
    UsageError,
    logger,
    text_of,
    without_provider_fields,
)
from agentenv.engine import (
    ChatCompletion,
    EngineFinding,
    Features,
    Sampling,
    Usage,
    refuse_grammar,
    require_no_password,
)
from agentenv.render import ReplyForm, TextProtocol
from agentenv_providers.openai.client import ChatClient, Key, Pace
from agentenv_providers.openai.errors import (
    ChatFailure,
    cut_short,
    error_of,
    filtered,
    malformed_call,
    too_long,
    words_of,
)
from agentenv_providers.openai.refusal import LIMITS, TOOLS, features_of, refused_feature
from agentenv_providers.openai.reply import LEFT_CALL, Unreadable, whole_reply
from agentenv_providers.openai.request import fields_of_form, messages_for

__all__ = ["OpenAIChatEngine"]

OFFICIAL = "api.openai.com"
MOST = 2.0**53
"""Beyond this no count or price is taken as one."""
SEEDS = 2**31
"""Seeds of many APIs are below this."""
CHARS_PER_TOKEN = 4
INSTEAD = {
    TOOLS: "they are described in the system message",
    "max_tokens": "max_completion_tokens is sent from now on",
    "max_completion_tokens": "max_tokens is sent from now on",
    "stop": "texts are cut at the stop strings here from now on",
    "empty text": "other words stand for it from now on",
    "broken arguments": "they are sent inside an object from now on",
}
"""What is done in place of leaving out."""
LEFT_IN_TEXT = (
    "leaves tool calls in the text: start the server with its parser for the model's calls "
    "(vLLM: --enable-auto-tool-choice and --tool-call-parser), or pass -o engine.text_tools=true"
)
UNREAD_CALL = "the tool call could not be read; write one valid call, or answer in text"

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
        retry_s: seconds for which a request is tried again; at a limit of rate they begin anew with each
            answer that any request gets.
        timeout_s: longest time in seconds in which nothing comes from the API.
        concurrency: most requests in flight at the same time; further requests wait.
        max_context_tokens: context limit of the model, if it is known.
        price_in: price of a million prompt tokens, for APIs that report no cost.
        price_out: price of a million completion tokens.
        requests_per_minute: most requests that are begun in a minute; None for no limit.
        tokens_per_minute: most tokens of prompts and answers in a minute; None for no limit.
        extra: further parameters, sent unchanged with each request.
        leave_out: names of parameters that are never sent, such as "seed".

    Raises:
        UsageError: The API of OpenAI needs a key, and there is none, or the address holds a password.
    """

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
        retry_s: float = 300.0,
        timeout_s: float = 600.0,
        concurrency: int = 32,
        max_context_tokens: int | None = None,
        price_in: float | None = None,
        price_out: float | None = None,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        extra: Mapping[str, JsonValue] | None = None,
        leave_out: Sequence[str] = (),
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
        self.address = address
        self._open = partial(
            ChatClient, api_key=api_key, headers=dict(headers or {}), retry_s=retry_s, timeout_s=timeout_s
        )
        self._stream = stream
        self._text_tools = text_tools
        self._prices = (price_in, price_out)
        self._extra = dict(extra or {})
        self._requests, self._tokens = Pace(requests_per_minute), Pace(tokens_per_minute)
        self._refused = {leave_out} if isinstance(leave_out, str) else set(leave_out)
        self._accepted: set[str] = set()
        self._told: set[str] = set()
        self._concurrency = concurrency
        self._room = asyncio.Semaphore(concurrency)
        self._client: ChatClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def features(self) -> Features:
        """It takes forms of replies, and examines its API."""
        return Features(forms=True, examine=self._examine)

    async def _examine(self) -> Sequence[EngineFinding]:
        from agentenv_providers.openai.examination import examine_api

        return await examine_api(self)

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JsonValue]],
        sampling: Sampling,
        *,
        deadline_s: float | None = None,
        form: ReplyForm | None = None,
    ) -> ChatCompletion:
        """Return the answer to a conversation; see `agentenv.engine.ChatEngine`.

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

    async def post(self, body: Mapping[str, Any], *, stream: bool = False) -> Any:
        """Send a request as it is, and return the JSON of the answer; the doctor asks so.

        Raises:
            ChatFailure: The API refused the request, or could not be reached.
            EOFError: A stream ended in the middle of the answer.
            Unreadable: The answer is no chat completion.
        """
        await self._settle()
        client = self._client = self._client or self._open(self.address)
        return await client.send({"model": self._model, **body, **self._extra}, stream=stream)

    async def _ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JsonValue]],
        sampling: Sampling,
        form: ReplyForm | None,
    ) -> ChatCompletion:
        client = self._client = self._client or self._open(self.address)
        left_out: set[str] = set()
        while True:
            body = self._body(messages, tools, sampling, form, self._refused | left_out)
            expected = len(str(body["messages"])) // CHARS_PER_TOKEN if self._tokens.limited else 0
            await self._requests.take()
            await self._tokens.take(expected)
            try:
                answer = await client.send(body, stream=self._stream)
                done = self._completion(answer, sampling, tools=bool(tools))
            except ChatFailure as error:
                if (written := malformed_call(error)) is not None:
                    said: Message = {"role": "assistant", "content": written}
                    return ChatCompletion(said, Usage(), "stop", f"{UNREAD_CALL} ({words_of(error)})")
                if cut_short(error):
                    return ChatCompletion({"role": "assistant", "content": ""}, Usage(), "length")
                if filtered(error):
                    _log.info("%s: a filter refused a conversation: %s", self.name, words_of(error))
                    return ChatCompletion({"role": "assistant", "content": ""}, Usage(), "content_filter")
                if too_long(error) or not self._adapt(error, body, left_out):
                    raise error_of(self.name, error) from error
            except EOFError as error:
                raise EngineUnavailable(f"{self.name}: {error}") from error
            except ValueError as error:
                raise EngineError(f"{self.name} did not answer with a chat completion: {error}") from error
            else:
                self._accepted.update(features_of(body))
                self._tokens.correct(done.usage.prompt_tokens + done.usage.completion_tokens - expected)
                return done

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

    def _body(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JsonValue]],
        sampling: Sampling,
        form: ReplyForm | None,
        left_out: set[str],
    ) -> dict[str, Any]:
        names = LIMITS[::-1] if OFFICIAL in self.address else LIMITS
        limit = next((name for name in names if name not in left_out), names[0])
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages_for(messages, self.name, left_out),
            "temperature": sampling.temperature,
            limit: sampling.token_limit,
        }
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.seed is not None:
            body["seed"] = sampling.seed % SEEDS
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        beyond = {"top_k": sampling.top_k, "min_p": sampling.min_p}
        extra = {**{key: value for key, value in beyond.items() if value}, **self._extra}
        if tools and self._text_tools:
            plain = [dict(without_provider_fields(message)) for message in messages]
            body["messages"] = TextProtocol().plain(plain, tools, system_role=True, opening=True)
        elif tools:
            body["tools"] = list(tools)
        if form is not None:
            body |= fields_of_form(form, body.get("tools", []))
        if self._stream:
            body["stream_options"] = {"include_usage": True}
        body |= extra
        for name in left_out:
            body.pop(name, None)
        return body

    def _adapt(self, error: ChatFailure, body: Mapping[str, Any], left_out: set[str]) -> bool:
        """Change requests so that the API may accept them; return False if nothing can be changed.

        What was accepted before is left out of this request alone: behind a gateway there are many servers.
        """
        features = features_of(body)
        name = refused_feature(error, features)
        accepted = name in {feature.partition("=")[0] for feature in features & self._accepted}
        if not name or (name == TOOLS and accepted):
            return False
        how = INSTEAD.get(name, "it is left out from now on")
        if name == TOOLS:
            self._text_tools = True
        else:
            (left_out if accepted else self._refused).add(name)
        self._tell_once(name, f"{self.name} refuses {name!r} ({words_of(error)}); {how}")
        return True

    def _tell_once(self, about: str, words: str) -> None:
        if about not in self._told:
            self._told.add(about)
            _log.warning("%s", words)

    def _completion(self, answer: Any, sampling: Sampling, *, tools: bool) -> ChatCompletion:
        if not isinstance(answer, Mapping):
            raise Unreadable(f"the answer is {answer!r:.80}")
        said = cast("Mapping[str, Any]", answer)
        choices = said.get("choices")
        # Some servers answer with the message alone, as Ollama's own API does.
        bare = said if isinstance(said.get("message"), Mapping) else None
        choice = choices[0] if isinstance(choices, list) and choices else bare
        inner = cast("Mapping[str, Any]", choice) if isinstance(choice, Mapping) else {}
        if body := said.get("error") or inner.get("error"):
            # Some proxies answer with status 200 and the error of the server behind them.
            raise ChatFailure("the answer is an error", body=body)
        if choice is None:
            raise Unreadable("it answered without a choice")
        reply = whole_reply(choice, self.name, tools=tools, text_tools=tools and self._text_tools)
        message = reply.message
        if "stop" in self._refused and (
            found := [at for t in sampling.stop if (at := text_of(message).find(t)) >= 0]
        ):
            message["content"] = text_of(message)[: min(found)]
        if reply.malformed and not self._text_tools and LEFT_CALL.search(text_of(message)):
            self._tell_once("left call", f"{self.name} {LEFT_IN_TEXT}")
        told = UNREAD_CALL if reply.malformed else ""
        return ChatCompletion(message, self._usage(said.get("usage")), reply.finish_reason, told)

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
