"""Score tokens that another model sampled: what would a vLLM server's model have given them?"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from agentenv.core.errors import EngineError
from agentenv.engine.reach import check_answers
from agentenv.engine.vllm.pool import ServerPool
from agentenv.engine.vllm.probe import Asker, probe

__all__ = ["PromptScorer"]

PATH = "/v1/completions"


class PromptScorer:
    """Asks one or several vLLM servers of the same model for the log-probabilities of given tokens.

    Args:
        url: address of a server, or several with commas between.
        concurrency: most requests in flight to each server; further requests wait.
        retry_s: seconds for which a request is retried after its first failure.
        api_key: key that is sent as a bearer token.

    Raises:
        EngineUnavailable: A server does not answer.
        EngineError: A server is not OpenAI-compatible, or the servers have different models.
    """

    def __init__(
        self, url: str, *, concurrency: int = 64, retry_s: float = 120.0, api_key: str | None = None
    ) -> None:
        urls = [part.strip() for part in url.split(",") if part.strip()]
        for one in urls:
            check_answers(f"the server {one}", one)
        reports = [probe(one, api_key=api_key) for one in urls]
        names = sorted({report.model for report in reports})
        if len(names) > 1:
            raise EngineError(
                f"the servers {url} have different models: {', '.join(names)}",
                remedy="name servers of one model",
            )
        self.name = url
        self._model = names[0]
        self._urls = [report.url for report in reports]
        limits = [report.max_context_tokens for report in reports if report.max_context_tokens is not None]
        # The server must have room for a token of its own, because it always samples one.
        self.max_tokens = min(limits) - 1 if limits else None
        """Length of the longest sequence that can be scored; None if it is not known."""
        self._key = api_key
        self._pool = ServerPool(self._urls, concurrency=concurrency, retry_s=retry_s, api_key=api_key)

    def encode(self, text: str) -> list[list[int]]:
        """Return the token ids of a text by the tokenizer of each server; this blocks.

        Raises:
            EngineUnavailable: A server does not answer.
            EngineError: A server has no `/tokenize`.
        """
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        askers = [Asker(url, self._key, self._pool.request_timeout_s) for url in self._urls]
        answers = [asker.ask("/tokenize", body) for asker in askers]
        return [list(answer.get("tokens") or ()) if isinstance(answer, dict) else [] for answer in answers]

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability of each token but the first, at temperature 1, of each sequence.

        Raises:
            ContextTooLong: A sequence is too long for the server.
            EngineUnavailable: No server could be reached in time.
            EngineError: The server refused a request, or did not score the tokens that it was sent.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._score(token_ids)) for token_ids in sequences]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._pool.close()
        return [task.result() for task in tasks]

    async def _score(self, token_ids: Sequence[int]) -> list[float]:
        body = {
            "model": self._model,
            "prompt": list(token_ids),
            "prompt_logprobs": 0,
            "max_tokens": 1,
            "temperature": 0.0,
        }
        return await self._pool.post(PATH, to_json(body), lambda answer, _: self._read(answer, token_ids))

    def _read(self, answer: Mapping[str, Any], token_ids: Sequence[int]) -> list[float]:
        try:
            scored: list[dict[str, Any]] = answer["choices"][0]["prompt_logprobs"]
            # The first token follows nothing, so it has no entry. The others are found by their ids.
            pairs = zip(scored[1:], token_ids[1:], strict=True)
            return [float(entry[str(token)]["logprob"]) for entry, token in pairs]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise EngineError(
                f"{self.name} did not score the tokens that it was sent: {type(error).__name__}: {error}",
                remedy="use a vLLM server, which answers with prompt_logprobs",
            ) from error
