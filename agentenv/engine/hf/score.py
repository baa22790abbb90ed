"""Recompute the log-probabilities of sampled tokens with a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agentenv.core.errors import UsageError
from agentenv.engine.base import Sampling
from agentenv.engine.hf.load import load_model, locate
from agentenv.engine.hf.sampler import cut_distribution
from agentenv.engine.packaged import PACKAGED

__all__ = ["TokenScorer"]

CHUNK = 256
"""Number of tokens that pass the model at once, which bounds the memory of their logits."""


class TokenScorer:
    """Computes the log-probability of each sampled token, at the settings that it was sampled with.

    Args:
        model: causal language model of transformers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @classmethod
    def load(cls, model: str) -> TokenScorer:
        """Load a model from a model string: `hf:PATH`, or the name of a packaged model.

        Raises:
            UsageError: The string names another engine, which cannot score given tokens.
            ModelNotFound, DependencyMissing: The model cannot be loaded.
        """
        kind, _, path = model.partition(":")
        if model not in PACKAGED and (kind not in {"hf", "vllm"} or not path):
            raise UsageError(
                f"{model} cannot recompute log-probabilities", remedy="name the model's weights as -m hf:PATH"
            )
        return cls(load_model(locate(path or model)))

    @torch.inference_mode()
    def score(
        self, token_ids: Sequence[int], parts: Sequence[tuple[int, int, Sampling]]
    ) -> list[list[float]]:
        """Return the log-probabilities of the tokens of each part.

        Args:
            token_ids: all tokens of a sequence.
            parts: `(start, end, sampling)` of each sampled part, in order.

        Raises:
            UsageError: A token is outside the model's vocabulary.
        """
        scored: list[list[float]] = [[] for _ in parts]
        last = max((end for _, end, _ in parts), default=0)
        ids = torch.tensor([list(token_ids[:last])], device=self._model.device)
        size = self._model.get_input_embeddings().num_embeddings
        if last and int(ids.max()) >= size:
            raise UsageError(f"token id {int(ids.max())} is outside the model's vocabulary of {size}")
        cache = None
        for begin in range(0, last - 1, CHUNK):
            end = min(begin + CHUNK, last - 1)
            out = self._model(ids[:, begin:end], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            for values, (start, stop, sampling) in zip(scored, parts, strict=True):
                # The logits of a position belong to the token after it.
                first, past = max(start - 1, begin), min(stop - 1, end)
                if first < past:
                    logits = out.logits[0, first - begin : past - begin].float()
                    values.extend(_logprobs(logits, ids[0, first + 1 : past + 1], sampling))
        return scored


def _logprobs(logits: torch.Tensor, labels: torch.Tensor, sampling: Sampling) -> list[float]:
    logits = logits / (sampling.temperature or 1.0)
    if sampling.temperature and (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        for row in logits:
            cut_distribution(row, sampling)
    return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0].tolist()
