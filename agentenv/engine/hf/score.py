"""Recompute the log-probabilities of sampled tokens with a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agentenv.core.errors import UsageError
from agentenv.core.images import ImageTokens
from agentenv.core.supports import Supports
from agentenv.engine.hf.load import load_model, locate
from agentenv.engine.hf.sampler import cut_distribution
from agentenv.engine.hf.vision import Vision, vision_of
from agentenv.engine.interface import Sampling
from agentenv.engine.packaged import PACKAGED
from agentenv.render.tokenizer import ChatTokenizer

__all__ = ["TokenScorer"]

CHUNK = 256
"""Number of tokens that pass the model at once, which bounds the memory of their logits."""


class TokenScorer:
    """Computes the log-probability of each sampled token, at the settings that it was sampled with.

    Args:
        model: causal language model of transformers.
        vision: what it sees with; None if it sees nothing.
    """

    def __init__(self, model: Any, vision: Vision | None = None) -> None:
        self._model = model
        self._vision = vision

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
        files = locate(path or model)
        loaded = load_model(files)
        tokenizer = ChatTokenizer.load(files.tokenizer.path, files.tokenizer.gguf_file)
        return cls(loaded, vision_of(loaded, tokenizer.images))

    @torch.inference_mode()
    def score(
        self,
        token_ids: Sequence[int],
        parts: Sequence[tuple[int, int, Sampling, Supports | None]],
        images: Sequence[ImageTokens] = (),
    ) -> list[list[float]]:
        """Return the log-probabilities of the tokens of each part.

        Args:
            token_ids: all tokens of a sequence.
            parts: `(start, end, sampling, supports)` of each sampled part, in order. Without supports a cut
                distribution is cut again, by what the model says now.
            images: the images among the tokens. With images, all tokens pass the model at once.

        Raises:
            UsageError: A token is outside the model's vocabulary, or the model does not see the images.
        """
        scored: list[list[float]] = [[] for _ in parts]
        last = max((end for _, end, *_ in parts), default=0)
        ids = torch.tensor([list(token_ids[:last])], device=self._model.device)
        size = self._model.get_input_embeddings().num_embeddings
        if last and int(ids.max()) >= size:
            raise UsageError(f"token id {int(ids.max())} is outside the model's vocabulary of {size}")
        if images and self._vision is None:
            raise UsageError("the model sees no images", remedy="name the model that sampled the tokens")
        shown = [image for image in images if image.end <= last]
        given: dict[str, Any] = {}
        if shown and self._vision is not None:
            given = self._vision.inputs(self._model, ids, [shown], None, frozen=True)
        cache, chunk = None, last if shown else CHUNK
        for begin in range(0, last - 1, chunk):
            end = min(begin + chunk, last - 1)
            if shown:  # the last token predicts nothing, so its logits are left aside
                out = self._model(ids, use_cache=False, **given)
            else:
                out = self._model(ids[:, begin:end], past_key_values=cache, use_cache=True)
            if self._vision is not None:
                out.logits[..., list(self._vision.banned_ids)] = float("-inf")
            cache = out.past_key_values
            for values, (start, stop, sampling, supports) in zip(scored, parts, strict=True):
                # The logits of a position belong to the token after it.
                first, past = max(start - 1, begin), min(stop - 1, end)
                if first < past:
                    logits = out.logits[0, first - begin : past - begin].float()
                    kept = None if supports is None else supports.cut(first + 1 - start, past + 1 - start)
                    values.extend(_logprobs(logits, ids[0, first + 1 : past + 1], sampling, kept))
        return scored


def _logprobs(
    logits: torch.Tensor, labels: torch.Tensor, sampling: Sampling, supports: Supports | None
) -> list[float]:
    logits = logits / (sampling.temperature or 1.0)
    if supports is not None:
        rows = torch.arange(len(logits)).repeat_interleave(torch.tensor(supports.lengths))
        place = rows.to(logits.device), torch.tensor(supports.token_ids, device=logits.device).long()
        left = logits[place]
        logits = torch.full_like(logits, float("-inf"))
        logits[place] = left
    elif sampling.is_cut:
        cut_distribution(logits, sampling)
    return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0].tolist()
