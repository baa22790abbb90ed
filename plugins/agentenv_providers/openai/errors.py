"""What the errors of chat APIs mean, in whatever shape they come."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, cast

from pydantic_core import from_json

from agentenv.core import ContextTooLong, EngineError, EngineUnavailable
from agentenv.engine import message_of

__all__ = [
    "ChatFailure",
    "error_of",
    "filtered",
    "malformed_call",
    "passing",
    "spent",
    "too_long",
    "words_of",
]

MAX_WORDS = 2000
"""Most characters of an error whose form is not known."""
BAD_REQUEST, TOO_LARGE, TOO_MANY, SERVER_ERROR = 400, 413, 429, 500
REFUSED = {BAD_REQUEST, 403, 422}
"""Statuses of requests of which a part may be refused."""
PASSING = re.compile("429|50[0234]|529|rate_limit_exceeded|server_error|overloaded_error")
"""Codes and types of errors after which a retry may succeed; they may also occur within a stream."""
SPENT = re.compile("insufficient_quota|usage_limit(_reached)?|quota_exceeded|billing_hard_limit_reached")
SPENT_WORDS = re.compile(r"per ?day\b|(daily|weekly|monthly) .*(limit|quota)|billing|credit|quota", re.I)
"""How APIs say that nothing is left, unless they say how soon there is more."""
PER_DAY = re.compile(r"per ?day|daily|monthly", re.I)
MALFORMED = re.compile(
    r"tool_use_failed|malformed_function_call|failed to (call a|parse (the )?(tool|function))"
    r"|tool call validation",
    re.I,
)
"""How APIs say that the model wrote a call that they cannot read: Groq, Gemini, and gateways."""
FILTERS = re.compile(
    r"content_(filter|policy)|ResponsibleAIPolicy|data_inspection_failed|sensitive_content|moderation"
    r"|content (management|safety) policy|content filter|usage (guidelines|policy)|flagged|guardrail"
    r"|prohibited content|safety (system|filter|reasons)",
    re.I,
)
"""How APIs say that a filter refused a conversation: Azure, OpenAI, DashScope, GLM, OpenRouter, xAI.
"""
CUT_SHORT = re.compile(r"could not finish the message|output limit was reached", re.I)
TOO_LONG_CODES = ("context_length_exceeded", "exceed_context_size_error", "string_above_max_length")
"""Codes and types of errors of conversations that are too long: of OpenAI and of llama.cpp."""
TOO_LONG = re.compile(
    r"context[ _](length|window|size|limit)|maximum (prompt|input|model) length"
    r"|(prompt|input) is too long|(prompt|input) (token count|length)\b.*\bexceed"
    r"|inputs` tokens \+ `max_new_tokens|range of input length|too many tokens:",
    re.I | re.DOTALL,
)
"""How servers say it: OpenAI, vLLM, SGLang, Mistral, llama.cpp; xAI; Anthropic and Bedrock; Gemini; TGI;
DashScope; Cohere."""


class ChatFailure(Exception):
    """A chat API refused a request, broke off its answer, or could not be reached."""

    def __init__(
        self, message: str, *, status: int | None = None, body: object = None, reached: bool = True
    ) -> None:
        super().__init__(message)
        self.message = message
        said = inner_of(body)
        self.said = said
        """The fields of the error; empty if it has none."""
        self.code, self.type, self.param = said.get("code"), said.get("type"), said.get("param")
        inside = int(code) if re.fullmatch(r"[45]\d\d", code := str(self.code)) else None
        self.status_code = inside if status is None else status
        """Status of the answer, or of the error in it; None without one, as of a stream that broke off."""
        self.body = body
        """The error in the answer, or the whole answer; None without an answer."""
        self.reached = reached
        """Whether the API answered at all."""
        found = re.search(r"retryDelay\W+([\d.]+)s", str(body))
        self.wait_s = float(found[1]) if found else None
        """The seconds for which the API asks to be left alone, in its body or a header; None if for none."""
        self.lasting = False
        """Whether the API asks to be left alone for longer than a request may wait."""

    @classmethod
    def of_status(cls, status: int, content: bytes) -> ChatFailure:
        """Return the failure that an answer with an error status stands for."""
        try:
            body: object = from_json(content)
        except ValueError:
            body = content.decode(errors="replace").strip()
        with suppress(ValueError):
            return cls(f"{status} {HTTPStatus(status).phrase}", status=status, body=body)
        return cls(f"status {status}", status=status, body=body)

    @classmethod
    def of_connection(cls, error: BaseException) -> ChatFailure:
        """Return the failure that a failed connection stands for."""
        silent = isinstance(error, TimeoutError)
        said = "the API did not answer in time" if silent else f"{type(error).__name__}: {error}"
        return cls(said, reached=False)

    @property
    def named(self) -> set[str]:
        """The codes, types and kinds by which the API names the error."""
        inner = self.said.get("innererror") or self.said.get("inner_error")
        further = cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else {}
        names = [self.code, self.type, self.said.get("status"), further.get("code")]
        choices = self.said.get("choices")
        if isinstance(choices, list):  # some gateways send a completion with the status of an error
            names += [choice.get("finish_reason") for choice in cast("list[Any]", choices) if choice]
        return {str(name) for name in names if name not in (None, "")}


def inner_of(body: object) -> Mapping[str, Any]:
    """Return the fields of the error in an answer, which may be a list or nested; empty if it has none."""
    while isinstance(body, list) and body:
        body = cast("list[object]", body)[0]
    if not isinstance(body, Mapping):
        return {}
    said = cast("Mapping[str, Any]", body)
    for key in ("error", "errors"):
        if inner := inner_of(said.get(key)):
            return inner
    return said


def words_of(error: ChatFailure) -> str:
    """Return what a failure says, with the words of the API whatever their form."""
    said = message_of(error.body)[:MAX_WORDS] if error.body else ""
    return error.message if not said or said in error.message else f"{error.message}: {said}"


def error_of(name: str, error: ChatFailure) -> EngineError:
    """Return our error for a failure of an API."""
    words = f"{name}: {words_of(error)}"
    if too_long(error):
        return ContextTooLong(words)
    status = error.status_code
    if spent(error):
        return EngineError(words, remedy="wait until the quota is renewed, and resume the run then")
    if status == BAD_REQUEST:
        return EngineError(f"{name} refused the request: {words_of(error)}")
    later = status is not None and (status == TOO_MANY or status >= SERVER_ERROR)
    return (EngineUnavailable if later or not error.reached or passing(error.body) else EngineError)(words)


def too_long(error: ChatFailure) -> bool:
    """Return True if an API refused a request because the conversation does not fit into the context."""
    status = error.status_code
    if status == TOO_LARGE or error.code in TOO_LONG_CODES or error.type in TOO_LONG_CODES:
        return True
    # A rate limit may count the tokens of a minute, in words like those of a context limit.
    return status != TOO_MANY and TOO_LONG.search(words_of(error)) is not None


def passing(body: object) -> bool:
    """Return True if the error of an API means that a retry may succeed."""
    said = inner_of(body)
    return any(PASSING.fullmatch(str(said.get(name))) for name in ("code", "type"))


def spent(error: ChatFailure) -> bool:
    """Return True if a quota of days or of money is used up, so that waiting for seconds is of no use."""
    if error.lasting or any(map(SPENT.fullmatch, error.named)):
        return True
    if error.status_code != TOO_MANY:
        return False
    if error.wait_s is not None:
        return PER_DAY.search(str(error.said.get("details"))) is not None
    return "rate_limit_exceeded" not in error.named and SPENT_WORDS.search(words_of(error)) is not None


def cut_short(error: ChatFailure) -> bool:
    """Return True if an API refused a request because its answer reached the limit, as OpenAI's may do."""
    return error.status_code == BAD_REQUEST and CUT_SHORT.search(words_of(error)) is not None


def filtered(error: ChatFailure) -> bool:
    """Return True if a filter refused the conversation or the answer."""
    said = " ".join([*error.named, words_of(error)])
    return error.status_code in {None, *REFUSED} and FILTERS.search(said) is not None


def malformed_call(error: ChatFailure) -> str | None:
    """Return the call that the model wrote and the API could not read; None if the error is another one."""
    if not MALFORMED.search(" ".join([*error.named, words_of(error)])):
        return None
    written = error.said.get("failed_generation")
    return written if isinstance(written, str) else ""
