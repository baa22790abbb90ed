"""A teacher behind a server, which scores the policy's tokens with `prompt_logprobs`."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from agentenv.core.errors import EngineError, EngineUnavailable, UsageError
from agentenv.core.loops import run_blocking
from agentenv.engine.vllm.scorer import PromptScorer
from agentenv.render.tokenizer import ChatTokenizer
from agentenv.training.rows import Row

__all__ = ["ServedTeacher"]

TEXT = (
    "The quick brown fox: 3.14 + x**2 != 1234567890;\n\tdef f(a):\n        return [a]  # 'it''s'\r\n\n"
    "Straße, naïve, Ελληνικά, русский язык, 日本語の文, 中文, 한국어, العربية, עברית, हिन्दी, 🙂👩‍🚀"
)
"""Text whose token ids are compared; few tokenizers encode so many kinds of characters in the same way."""


class ServedTeacher:
    """A model on vLLM servers in the place of the reference.

    If the environment variable `VLLM_API_KEY` is set, its value is sent as the servers' key.

    Args:
        address: address of a server, or several with commas between.
        tokenizer: tokenizer of the policy; None leaves out its comparison with that of the servers.

    Raises:
        EngineUnavailable: A server does not answer.
        UsageError: The tokens of a server are not those of the policy.
    """

    def __init__(self, address: str, tokenizer: ChatTokenizer | None) -> None:
        self._scorer = PromptScorer(address, api_key=os.environ.get("VLLM_API_KEY"))
        if tokenizer is not None:
            self._require_tokens(tokenizer)

    def _require_tokens(self, tokenizer: ChatTokenizer) -> None:
        added = (token.content for token in tokenizer.added_tokens.values())
        text = TEXT + "".join(added)
        try:
            theirs = self._scorer.encode(text)
        except EngineUnavailable:
            raise
        except EngineError as error:
            raise UsageError(
                f"the tokenizer of the teacher {self._scorer.name} cannot be compared: {error}",
                remedy="use a vLLM server, which has /tokenize",
            ) from None
        if any(ids != tokenizer.encode(text) for ids in theirs):
            raise UsageError(
                f"the tokens of the teacher {self._scorer.name} are not those of {tokenizer.name}",
                remedy="name a teacher with the same tokenizer, such as a larger model of the same family",
            )

    def score(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Return the log-probabilities of each row's trained tokens under the teacher. This blocks.

        Raises:
            UsageError: A row does not fit the teacher, or was sampled from a cut distribution.
            EngineUnavailable: No server could be reached in time.
            EngineError: A server refused a row, or did not score its tokens.
        """
        longest = self._scorer.max_tokens
        for row in rows:
            if row.supports is not None:
                raise UsageError(
                    f"the teacher {self._scorer.name} scores tokens among its whole vocabulary, which cannot "
                    "be compared with those of a cut distribution (top_p, top_k or min_p)",
                    remedy="leave out top_p, top_k and min_p, or load the teacher in the trainer",
                )
            if longest is not None and len(row.token_ids) > longest:
                raise UsageError(
                    f"a row of {len(row.token_ids)} tokens is longer than the {longest} that the teacher "
                    f"{self._scorer.name} can score",
                    remedy=f"set limits.max_context_tokens to {longest}, or raise its --max-model-len",
                )
        scored = run_blocking(self._scorer.score([row.token_ids for row in rows])) if rows else []
        return [
            torch.tensor(logprobs)[row.positions_n - 1] for row, logprobs in zip(rows, scored, strict=True)
        ]
