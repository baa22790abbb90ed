"""Log-probabilities of trained tokens, computed without the logits of all tokens at once.

The LM head runs only on positions that predict a trained token, one chunk at a time. Probabilities beyond a
fixed memory budget are recomputed in the backward pass, so memory does not grow with the number of tokens.
Gradients of the head's weight are summed over the chunks in float32, even if the model is bfloat16. On CUDA
the operands of these sums are in the model's format, as those of all its layers: with operands in float32
they would take as long as all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agentenv.training.learners.pass_sizes import CHUNK, CHUNK_ON_CUDA, KEPT_BYTES
from agentenv.training.rows import TokenSupports, to_device

__all__ = ["chunked_logprobs", "plain_logprobs"]

WIDE_SUMS = "2.10"
"""Version since which torch adds a product of narrow matrices to a wide one, on CUDA."""


def chunked_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    softcap: float | None = None,
    bias_V: Tensor | None = None,
    supports: TokenSupports | None = None,
    banned: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each label and the entropy at its position, both `[N]`.

    The distribution is `softmax(logits / temperature)`, computed in at least float32. The temperature must
    divide the logits; scaling a log-probability does not give the same number. With supports, it is the
    softmax over the support of each label, and the entropy is that of the same distribution.

    Args:
        hidden_NH: last hidden states at the positions that predict the labels.
        weight_VH: the LM head's weight.
        labels_N: the token ids to score.
        temperature: temperature of the distribution, above 0.
        chunk: number of positions that pass the head at once; None takes what suits the device.
        softcap: if set, logits become `softcap * tanh(logits / softcap)` first (Gemma's final cap).
        bias_V: the LM head's bias.
        supports: what each label was sampled from; None means the whole vocabulary for all.
        banned: ids that have the probability 0.
    """
    chunk = chunk or (CHUNK_ON_CUDA if weight_VH.is_cuda else CHUNK)
    head = _Head(weight_VH, max(1, min(chunk, labels_N.numel())), temperature, softcap, supports, banned)
    # Without a backward pass nothing is kept. This is decided here, because gradients always look disabled
    # inside an autograd function.
    kept = head.rows_within(KEPT_BYTES, labels_N.numel()) if torch.is_grad_enabled() else 0
    logprobs_N, entropy_N = _HeadLogprobs.apply(hidden_NH, weight_VH, bias_V, labels_N, head, kept)
    return logprobs_N, entropy_N


def plain_logprobs(
    logits_NV: Tensor,
    labels_N: Tensor,
    *,
    temperature: float = 1.0,
    supports: TokenSupports | None = None,
    banned: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Return the same as `chunked_logprobs`, from existing logits."""
    scaled_NV = _wide(logits_NV) / temperature
    if banned:
        ids = to_device(torch.tensor(banned), scaled_NV.device)
        scaled_NV = scaled_NV.index_fill(-1, ids, torch.finfo(scaled_NV.dtype).min)
    log_p_NV = torch.log_softmax(scaled_NV if supports is None else supports.cut(scaled_NV), dim=-1)
    logprobs_N = log_p_NV.gather(-1, labels_N[:, None]).squeeze(-1)
    return logprobs_N, -(log_p_NV.exp() * log_p_NV).sum(-1)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class _HeadLogprobs(torch.autograd.Function):  # pyright: ignore[reportUntypedBaseClass]
    """The forward pass reduces the logits of each chunk; the backward pass uses its probabilities.

    With p = softmax(z / T), H = -sum p ln p, and incoming gradients g (of the logprob) and h (of H):
    dz = (g * (onehot - p) - h * p * (ln p + H)) / T. The probabilities of the first tokens are kept, up to
    `KEPT_BYTES`; those of the other tokens are recomputed.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        head: _Head,
        kept: int,
    ) -> tuple[Tensor, Tensor]:
        head.bias_V = bias_V
        logprobs_N = hidden_NH.new_empty(labels_N.shape, dtype=head.dtype)
        entropy_N = torch.empty_like(logprobs_N)
        kept_KV = head.new_rows(kept)
        for part in _chunks(labels_N.numel(), kept, head.chunk):
            logits, p, _ = head.probabilities(hidden_NH, part, kept_KV[part] if part.stop <= kept else None)
            # Computed from the largest p, because the p of a label may be too small to represent.
            lse = logits.amax(-1) - p.amax(-1).log()
            logprobs_N[part] = logits.gather(-1, labels_N[part, None]).squeeze(-1) - lse
            entropy_N[part] = lse - logits.mul_(p).sum(-1)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, labels_N, entropy_N)
        ctx.head, ctx.kept_KV = head, kept_KV
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, labels_N, entropy_N = ctx.saved_tensors
        head: _Head = ctx.head
        kept_KV: Tensor = ctx.kept_KV
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden_NH = torch.empty_like(hidden_NH) if need_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=head.dtype) if need_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=head.dtype) if need_bias else None
        for part in _chunks(labels_N.numel(), len(kept_KV), head.chunk):
            if part.stop <= len(kept_KV):
                p, slope = kept_KV[part], None
            else:
                _, p, slope = head.probabilities(hidden_NH, part)
            of_logprobs, of_entropy = (None if grad is None else grad[part, None] for grad in grads)
            grad_logits, scale_n1 = _grad_logits(
                p, labels_N[part, None], of_logprobs, entropy_N[part, None], of_entropy
            )
            scale_n1 = scale_n1 / head.temperature
            if slope is not None:
                grad_logits *= slope
            narrow_logits = grad_logits.to(weight_VH.dtype)
            if grad_hidden_NH is not None:
                grad_hidden_NH[part] = (narrow_logits @ weight_VH) * scale_n1
            if grad_weight_VH is not None:
                scaled_nH = hidden_NH[part] * scale_n1
                if weight_VH.is_cuda:
                    add_product(grad_weight_VH, narrow_logits.T, scaled_nH.to(weight_VH.dtype))
                else:
                    grad_weight_VH.addmm_(grad_logits.T, scaled_nH)
            if grad_bias_V is not None:
                grad_bias_V.addmv_(grad_logits.T, scale_n1[:, 0])
        ctx.kept_KV = head.new_rows(0)  # overwritten above, so a second backward pass recomputes them
        sums = (grad_weight_VH, grad_bias_V)
        of_head = (None if grad is None else grad.to(weight_VH.dtype) for grad in sums)
        return grad_hidden_NH, *of_head, None, None, None


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of matrices to a sum in a wider number format, without rounding the product first."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and torch.__version__ >= WIDE_SUMS:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


class _Head:
    """Computes logits and probabilities of chunks in memory that it reuses.

    Allocating fresh memory of this size takes about as long as computing the numbers in it.
    """

    def __init__(  # noqa: PLR0917 - of this module alone
        self,
        weight_VH: Tensor,
        chunk: int,
        temperature: float,
        softcap: float | None,
        supports: TokenSupports | None = None,
        banned: Sequence[int] = (),
    ) -> None:
        self.supports = supports
        self.banned = to_device(torch.tensor(banned), weight_VH.device) if banned else None
        self.weight_VH = weight_VH
        self.bias_V: Tensor | None = None
        self.chunk = chunk
        self.temperature = temperature
        self.softcap = softcap
        self.dtype = torch.float64 if weight_VH.dtype == torch.float64 else torch.float32
        self._logits = self.new_rows(chunk)
        self._p: Tensor | None = None

    def rows_within(self, num_bytes: int, most: int) -> int:
        """Return how many positions may be kept: none with a soft cap, whose slope is not kept."""
        row_bytes = len(self.weight_VH) * self.dtype.itemsize
        return 0 if self.softcap is not None else min(most, num_bytes // row_bytes)

    def new_rows(self, count: int) -> Tensor:
        """Return uninitialised memory for the probabilities of `count` positions."""
        return self.weight_VH.new_empty(count, len(self.weight_VH), dtype=self.dtype)

    def probabilities(
        self, hidden_NH: Tensor, part: slice, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return scaled logits, probabilities and the soft cap's slope, all valid until the next call.

        The probabilities outside a support are 0, with which no gradient comes back from there.
        """
        hidden = hidden_NH[part]
        logits = self._logits[: len(hidden)]
        if hidden.dtype == self.dtype:
            torch.mm(hidden, self.weight_VH.T, out=logits)
        else:
            logits.copy_(hidden @ self.weight_VH.T)
        if self.bias_V is not None:
            logits.add_(self.bias_V)
        slope = None
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_()
            slope = 1 - logits * logits
            logits.mul_(self.softcap)
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        if self.banned is not None:
            logits.index_fill_(-1, self.banned, torch.finfo(logits.dtype).min)
        if self.supports is not None:
            self.supports.part(part).cut_(logits)
        if out is None:
            self._p = self.new_rows(self.chunk) if self._p is None else self._p
            out = self._p[: len(hidden)]
        return logits, torch.softmax(logits, dim=-1, out=out), slope


def _chunks(count: int, kept: int, chunk: int) -> list[slice]:
    """Cut positions into chunks, each of which is kept whole or not at all."""
    return [
        slice(start, min(start + chunk, stop))
        for first, stop in ((0, kept), (kept, count))
        for start in range(first, stop, chunk)
    ]


def _grad_logits(
    p: Tensor, labels: Tensor, grad_logprobs: Tensor | None, entropy: Tensor, grad_entropy: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradient of a chunk's scaled logits as a matrix and the factor of each of its rows.

    The caller applies the factors to the other operand of its product, which is far smaller. `p` is
    overwritten.

    Args:
        p: probabilities of the chunk, `[n, V]`; all other tensors are `[n, 1]`.
        labels: labels of the chunk.
        grad_logprobs: incoming gradient of the labels' logprobs.
        entropy: entropies of the chunk.
        grad_entropy: incoming gradient of the entropies.
    """
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(entropy)
    if grad_entropy is None:
        return p.scatter_add_(-1, labels, p.new_full(labels.shape, -1.0)), -grad_logprobs
    of_entropy = torch.xlogy(p, p).addcmul_(p, entropy).mul_(grad_entropy)
    grad = p.mul_(-grad_logprobs).scatter_add_(-1, labels, grad_logprobs)
    return grad.sub_(of_entropy), torch.ones_like(entropy)
