"""The forward passes of the transformers engine: prefill adds rows, and all rows decode together.

This module deals with tensors and rows and does not know requests. It is not thread-safe: only the
worker uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import inf
from operator import add
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from agentenv.core.errors import UsageError
from agentenv.core.faults import first_line_of
from agentenv.core.routed_experts import RoutedExperts
from agentenv.engine.hf.adapters import base_model
from agentenv.engine.hf.attention import SharedColumns, long_rows, use_grouped_attention
from agentenv.engine.hf.buffers import RowBuffers, SavedRow
from agentenv.engine.hf.experts import ExpertRecorder
from agentenv.engine.hf.packed import PaddingCost, segments_of
from agentenv.engine.hf.positions import fix_frequencies
from agentenv.engine.hf.products import Products
from agentenv.engine.hf.seeing import Sight
from agentenv.engine.hf.vision import Vision

__all__ = ["PREFILL_TOKENS", "ForwardCore"]

Prefill: TypeAlias = Callable[[int, Sequence[Sequence[int]]], torch.Tensor]
"""A pass that adds tokens to the rows from the first one on; see `ForwardCore.prefill`."""

PREFILL_TOKENS = 2048
"""Most tokens of one prefill pass, padding included, to bound its memory and the wait of other rows."""
SHARED_COLUMNS = 256
"""Fewest columns of a beginning that rows refer to; below, eight copies are read faster."""
FREE_PADDING = 16
"""Tokens by which a row may be more than twice as long as the shortest row that is padded beside it."""
# The check at construction runs this many tokens, of which the last ones are decoded one by one.
CHECK_TOKENS = 16
CHECK_DECODED = 4
LONGEST_CHECKED_WINDOW = 1024


class ForwardCore:
    """A causal language model with live rows.

    Raises:
        UsageError: The model's layers cannot be decoded row by row (recurrent or convolution
            layers), decoding does not agree with a plain forward pass, or the numbers of a row depend on
            the longest row beside it.
    """

    def __init__(
        self,
        model: Any,
        *,
        check: bool = True,
        tell_experts: bool = False,
        vision: Vision | None = None,
    ) -> None:
        self.model = model
        self.config = text_config(model)
        self.device: torch.device = model.device
        self.windows = attention_windows(self.config)
        self.buffers = RowBuffers(by_tokens=self.device.type == "cpu")
        self.products = Products(model)
        inner = base_model(model)
        self.experts = ExpertRecorder(inner) if tell_experts else None
        grouped = isinstance(inner, PreTrainedModel) and use_grouped_attention(inner)
        fix_frequencies(inner)
        self.sight = None if vision is None else Sight(vision, inner, self.buffers)
        """What the rows see; None for a model that sees nothing."""
        self.packs = (
            grouped and self.device.type == "cpu" and self.windows == {"all": None} and self.sight is None
        )
        """Whether rows of different lengths are prefilled as one packed row. On a GPU, the calls of a row's
        own attention take longer than padding."""
        self._padding = PaddingCost(inner, self.config.num_hidden_layers) if self.packs else None
        if check:
            self._check()

    @property
    def live(self) -> int:
        """Number of live rows."""
        return len(self.buffers.lengths)

    @torch.no_grad()
    def prefill(self, entries: Sequence[tuple[SavedRow | None, int, Sequence[int]]]) -> torch.Tensor:
        """Add rows and return the logits after their last token, [entries, V] in float32.

        Args:
            entries: for each new row: a saved row to start from or None, the number of its columns to keep,
                and the tokens that follow (at least one).
        """
        first = self.live
        begun = [None if saved is None else saved.cut(length) for saved, length, _ in entries]
        own = [0 if saved is None else saved.own for saved in begun]
        new = [tokens for _, _, tokens in entries]
        counts = [len(tokens) for tokens in new]
        self.buffers.reserve(len(entries), max(map(add, own, counts)))
        for saved in begun:
            self.buffers.append(saved)
        shared = any(self.buffers.shared[first:])  # only a packed pass knows of columns outside the buffers
        if len(entries) == 1:
            one_pass = self._packed_pass if shared else self._prefill_pass
            return [one_pass(first, [chunk]) for chunk in self._chunks(new[0])][-1]
        if shared or (self._padding is not None and self.packs and self._padding.packing_pays(counts)):
            return self._packed_pass(first, new)
        return self._prefill_pass(first, new)

    def _chunks(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        if self.sight is not None:
            return self.sight.chunks(tokens, PREFILL_TOKENS)
        return [tokens[cut : cut + PREFILL_TOKENS] for cut in range(0, len(tokens), PREFILL_TOKENS)]

    def fit_together(self, counts: Sequence[int]) -> bool:
        """Return whether rows should be prefilled in one pass.

        Args:
            counts: numbers of their new tokens, the least first.
        """
        if self.packs:
            return sum(counts) <= PREFILL_TOKENS
        return counts[-1] <= 2 * counts[0] + FREE_PADDING and counts[-1] * len(counts) <= PREFILL_TOKENS

    @torch.no_grad()
    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append one token to every live row and return the next logits, [live, V] in float32."""
        width = self.buffers.plan_decode(self.device)
        positions = torch.tensor(self.buffers.lengths, device=self.device)[:, None]
        ids = torch.tensor(tokens, device=self.device)[:, None]
        given: dict[str, Any] = {}
        columns = positions
        if self.packs:
            own = self.buffers.own
            given = {"long_rows": long_rows([count + 1 for count in own]), "shared": self._shared()}
            columns = torch.tensor(own, device=self.device)[:, None]
        mask = self._mask(columns, width)
        if self.sight is not None:
            positions = self.sight.step(positions)
        logits = self._forward(ids, positions, mask, **given)[:, -1]
        self.buffers.lengths = [length + 1 for length in self.buffers.lengths]
        return logits

    def _shared(self) -> list[SharedColumns]:
        rows: dict[SavedRow, list[int]] = {}
        for row, columns in enumerate(self.buffers.shared):
            if columns is not None:
                rows.setdefault(columns, []).append(row)
        return [SharedColumns(torch.tensor(of), columns) for columns, of in rows.items()]

    def _packed_pass(self, first: int, new: Sequence[Sequence[int]]) -> torch.Tensor:
        counts = [len(tokens) for tokens in new]
        lengths = self.buffers.lengths[first:]
        self.buffers.plan_prefill(first, counts, packed=True)
        ids = torch.tensor([[token for tokens in new for token in tokens]], device=self.device)
        positions = torch.cat(
            [torch.arange(at, at + count) for at, count in zip(lengths, counts, strict=True)]
        )
        # The model makes no mask of its own if it gets one of four dimensions; segments have their own.
        unused = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        like = torch.empty(0, dtype=self.model.dtype, device=self.device)
        logits = self._forward(
            ids,
            positions[None].to(self.device),
            unused,
            logits_to_keep=torch.tensor(counts, device=self.device).cumsum(0) - 1,
            segments=segments_of(self.buffers, first, counts, like=like),
        )[0]
        self._grow(first, counts)
        return logits

    def _prefill_pass(self, first: int, new: Sequence[Sequence[int]]) -> torch.Tensor:
        counts = [len(tokens) for tokens in new]
        longest = max(counts)
        width = self.buffers.plan_prefill(first, counts)
        rows = [[0] * (longest - len(tokens)) + list(tokens) for tokens in new]
        rows, images = (rows, []) if self.sight is None else self.sight.read(rows)
        ids = torch.tensor(rows)
        starts = torch.tensor(self.buffers.lengths[first:])[:, None]
        pads = torch.tensor([longest - count for count in counts])[:, None]
        positions = (starts + torch.arange(longest)[None] - pads).clamp_(min=0)
        positions = positions.to(self.device)
        mask, given = self._mask(positions, width), {}
        if self.sight is not None:
            given = self.sight.vectors(images)
            mask = self.sight.unmask(mask, images, positions, self.windows)
            positions = self.sight.begin(images, positions, counts)
        logits = self._forward(ids.to(self.device), positions, mask, **given)[:, -1]
        self._grow(first, counts)
        return logits

    def _grow(self, first: int, counts: Sequence[int]) -> None:
        for row, count in enumerate(counts, start=first):
            self.buffers.lengths[row] += count

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | dict[str, torch.Tensor],
        *,
        logits_to_keep: int | torch.Tensor = 1,
        **given: Any,
    ) -> torch.Tensor:
        if self.model.training:
            self.model.eval()
        with self.products.on(), nullcontext() if self.experts is None else self.experts.recording():
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self.buffers,
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **given,
            )
        if self.experts is not None:
            self.buffers.record_routed(self.experts.taken(*ids.shape))
        if self.sight is not None:
            self.sight.end(positions)
        return output.logits.float()

    def routed_experts(self, row: int) -> RoutedExperts | None:
        """Return the experts that the tokens of a row were sent to; None if they are not recorded."""
        return None if self.experts is None else self.experts.told(self.buffers.routed(row))

    def _mask(self, positions: torch.Tensor, width: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return additive masks [B, 1, T, width], with which a token sees itself and all tokens before it."""
        columns = torch.arange(width, device=self.device)
        distance = positions[:, None, :, None] - columns
        masks: dict[str, torch.Tensor] = {}
        for name, window in self.windows.items():
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
            hidden = torch.finfo(self.model.dtype).min
            mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=self.device)
            masks[name] = mask.masked_fill_(~seen, hidden)
        return masks if len(masks) > 1 or "sliding_attention" in masks else masks["all"]

    def _check(self) -> None:
        """Check on a short sequence that prefill and decoding agree with one plain forward pass."""
        windows = [window for window in self.windows.values() if window is not None]
        longest = max((window for window in windows if window <= LONGEST_CHECKED_WINDOW), default=0)
        ids = [(7 + 31 * index) % (self.config.vocab_size - 1) for index in range(CHECK_TOKENS + longest)]
        self.model.eval()
        with torch.no_grad():
            plain = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits[0]
        expected = plain[len(ids) - CHECK_DECODED - 1 :].float().log_softmax(-1)
        limit = 1e-3 if self.model.dtype == torch.float32 else 0.1
        self.packs = self.packs and self._packed_error(ids, expected) < limit
        # The columns that rows share are read in float32 alone, like those of `_by_products`.
        if self.packs and self.model.dtype == torch.float32 and self.experts is None:
            self.buffers.least_shared = 1
            shares = self._packed_error(ids, expected) < limit
            self.buffers.least_shared = SHARED_COLUMNS if shares else sys.maxsize
        try:
            error = self._error(ids, expected, self._prefill_pass)
        except torch.OutOfMemoryError:
            raise
        except (IndexError, RuntimeError, TypeError, ValueError) as refusal:
            raise UsageError(
                f"{type(self.model).__name__} does not take rows whose keys and values are kept for it "
                f"({type(refusal).__name__}: {first_line_of(refusal)}): this engine does not support its "
                "attention",
                remedy="use vllm: or a vLLM server",
            ) from refusal
        if not error < limit:
            raise UsageError(
                f"decoding {type(self.model).__name__} with kept keys and values does not agree with a plain "
                f"forward pass (relative difference {error:.3g}, limit {limit}): this engine "
                "does not support its attention",
                remedy="use vllm: or a vLLM server",
            )

    def _packed_error(self, ids: list[int], expected: torch.Tensor) -> float:
        """Return the error with packed rows; infinite for a model that does not hand segments on."""
        try:
            return self._error(ids, expected, self._packed_pass)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            self.buffers.clear()
            return inf

    @torch.no_grad()
    def _error(self, ids: list[int], expected: torch.Tensor, prefill: Prefill) -> float:
        """Return the mean difference of log-probabilities, relative to how much they vary."""
        prefilled = len(ids) - CHECK_DECODED
        length = prefilled // 2
        self.prefill([(None, 0, ids[:length])])
        saved = self.buffers.share(0)
        self.buffers.remove(0)
        kept = length if saved.shared is not None else length - 1
        self.buffers.append(saved.cut(kept))
        self.buffers.append(None)
        got = [prefill(0, [ids[kept:prefilled], ids[:3]])[:1]]
        got += [self.decode([token, 1])[:1] for token in ids[prefilled:]]
        self.buffers.clear()
        return float((torch.cat(got).log_softmax(-1) - expected).abs().mean() / expected.std())


def text_config(model: Any) -> Any:
    """Return the configuration of the text model."""
    return model.config.get_text_config()


def attention_windows(config: Any) -> dict[str, int | None]:
    """Return the kinds of attention masks that a model needs, each with its window.

    Raises:
        UsageError: A layer has a state other than keys and values.
    """
    kinds: list[str] = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    unknown = [kind for kind in kinds if kind not in {"full_attention", "sliding_attention"}]
    if unknown or getattr(config, "is_encoder_decoder", False):
        what = ", ".join(unknown) or "an encoder"
        raise UsageError(
            f"the model type {config.model_type!r} has {what}, which the transformers engine cannot decode "
            "row by row",
            remedy="use vllm: or a vLLM server",
        )
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    if "sliding_attention" in kinds:
        return {"full_attention": None, "sliding_attention": window}
    if kinds:
        return {"all": None}
    return {"all": window}
