"""A vLLM server's streamed answer: its chunks are passed on, and joined into an answer of the usual form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic_core import from_json

from agentenv.core.errors import EngineError

__all__ = ["JoinedStream", "TokenTeller"]


class TokenTeller:
    """Tells the tokens of a completion, which may have to be sampled again by another server.

    Args:
        on_tokens: is told the next tokens.
    """

    def __init__(self, on_tokens: Callable[[Sequence[int]], None]) -> None:
        self.told: list[int] = []
        self._on_tokens = on_tokens

    def tell(self, tokens: Sequence[int], start: int) -> None:
        """Tell tokens, of which those that were told before must be equal.

        Args:
            tokens: tokens of the completion.
            start: number of tokens before them.

        Raises:
            EngineError: They are not those that were told.
        """
        # Whoever listens cannot take tokens back, so a second try must sample them again exactly; with the
        # seed of the request it mostly does.
        known = max(len(self.told) - start, 0)
        if list(tokens[:known]) != self.told[start : start + len(tokens)]:
            raise EngineError(
                "the request was sent again after a part of its completion was passed on, and other tokens "
                "were sampled"
            )
        if new := list(tokens[known:]):
            self.told += new
            self._on_tokens(new)


class JoinedStream:
    """The chunks of one streamed answer.

    Args:
        teller: is told the tokens.
    """

    def __init__(self, teller: TokenTeller) -> None:
        self._teller = teller
        self._rest = b""
        self._tokens: list[int] = []
        self._content: list[Any] = []
        self._logprobs: list[Any] = []
        self._tops: list[Any] = []
        self._reason: str | None = None
        self._end: dict[str, Any] = {}
        """What only the last chunk has."""

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the answer.

        Raises:
            EngineError: The server failed, or sampled other tokens than were told.
            ValueError, KeyError, TypeError: The bytes are no such answer.
        """
        # Chunks of the connection end anywhere, also inside a character, so bytes are cut at line ends only.
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            name, _, value = line.strip().partition(b":")
            if name == b"data" and value.strip() != b"[DONE]":
                self._read(from_json(value))

    def _read(self, chunk: dict[str, Any]) -> None:
        # The status 200 was sent with the first token, so a later failure can only stand in the stream.
        if error := chunk.get("error"):
            said = error.get("message") if isinstance(error, dict) else error
            raise EngineError(f"the server failed while it sampled: {said}")
        for choice in chunk.get("choices") or ():
            tokens = choice.get("token_ids") or ()
            self._teller.tell(tokens, len(self._tokens))
            self._tokens += tokens
            logprobs = choice.get("logprobs") or {}
            self._content += logprobs.get("content") or ()
            self._logprobs += logprobs.get("token_logprobs") or ()
            self._tops += logprobs.get("top_logprobs") or ()
            self._reason = choice.get("finish_reason") or self._reason
            if routed := choice.get("routed_experts"):
                self._end["routed_experts"] = routed

    def answer(self) -> dict[str, Any]:
        """Return the answer as if it had not been streamed; it names no weights.

        Raises:
            EngineError: It has no end.
        """
        # A connection that closes looks like an end. Only a finish reason tells a whole completion from a cut
        # one.
        if self._reason is None:
            raise EngineError("the server ended its answer in the middle of the completion")
        logprobs = {"content": self._content, "token_logprobs": self._logprobs, "top_logprobs": self._tops}
        return {
            "choices": [
                {"token_ids": self._tokens, "logprobs": logprobs, "finish_reason": self._reason, **self._end},
            ]
        }
