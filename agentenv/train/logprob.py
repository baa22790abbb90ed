"""Log-probabilities of chosen tokens without the logits of all of them.

The LM head runs only on positions that predict a trained token, a chunk at a time, and what does not
fit a fixed budget is made again in the backward pass: memory is flat in the number of tokens.
Gradients of the head's weight are summed over the chunks in float32 also when the model is bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["chunked_logprobs", "plain_logprobs"]

KEPT_BYTES = 16 << 20
"""Memory for probabilities kept from the forward to the backward pass: a matrix product less."""


def chunked_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = 256,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each label and the entropy at its position, both `[N]`.

    The distribution is `softmax(logits / temperature)`, computed in float32 at least. The
    temperature divides logits: multiplying a logprob by T is not the same number.

    Args:
        hidden_NH: last hidden states at the positions that predict the labels.
        weight_VH: the LM head's weight.
        labels_N: token ids.
        temperature: more than 0.
        chunk: positions at once.
        softcap: logits become `softcap * tanh(logits / softcap)` first (Gemma's final cap).
    """
    logprobs_N, entropy_N = _HeadLogprobs.apply(hidden_NH, weight_VH, labels_N, temperature, chunk, softcap)
    return logprobs_N, entropy_N


def plain_logprobs(logits_NV: Tensor, labels_N: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return what `chunked_logprobs` returns, from logits that are there already."""
    log_p_NV = torch.log_softmax(_wide(logits_NV) / temperature, dim=-1)
    logprobs_N = log_p_NV.gather(-1, labels_N[:, None]).squeeze(-1)
    return logprobs_N, -(log_p_NV.exp() * log_p_NV).sum(-1)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class _HeadLogprobs(torch.autograd.Function):  # pyright: ignore[reportUntypedBaseClass]
    """Forward: the logits of a chunk, reduced at once. Backward: its probabilities, then the gradients.

    With p = softmax(z / T), H = -sum p ln p, and incoming gradients g (of the logprob) and h (of H):
    dz = (g * (onehot - p) - h * p * (ln p + H)) / T. The probabilities of the first chunks are kept,
    up to `KEPT_BYTES`; those of the others are made again.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        labels_N: Tensor,
        temperature: float,
        chunk: int,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
        logprobs_N = torch.empty(labels_N.shape, dtype=dtype, device=hidden_NH.device)
        entropy_N = torch.empty_like(logprobs_N)
        kept: list[Tensor] = []
        room = KEPT_BYTES if any(ctx.needs_input_grad[:2]) and softcap is None else 0
        for start in range(0, labels_N.numel(), chunk):
            part = slice(start, start + chunk)
            log_p, _ = _log_softmax(hidden_NH[part], weight_VH, temperature, softcap)
            logprobs_N[part] = log_p.gather(-1, labels_N[part, None]).squeeze(-1)
            p = log_p.exp()
            entropy_N[part] = -torch.bmm(p[:, None], log_p[:, :, None]).flatten()
            room -= p.nbytes
            if room >= 0:
                kept.append(p)
        ctx.save_for_backward(hidden_NH, weight_VH, labels_N, entropy_N)
        ctx.kept = kept
        ctx.settings = (temperature, chunk, softcap)
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grad_logprobs_N, grad_entropy_N = grads
        if grad_logprobs_N is None and grad_entropy_N is None:
            return None, None, None, None, None, None
        hidden_NH, weight_VH, labels_N, entropy_N = ctx.saved_tensors
        temperature, chunk, softcap = ctx.settings
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden_NH = torch.empty_like(hidden_NH) if need_hidden else None
        grad_weight_VH = None
        if need_weight:
            grad_weight_VH = torch.zeros(weight_VH.shape, dtype=entropy_N.dtype, device=weight_VH.device)
        kept: list[Tensor] = ctx.kept if grad_entropy_N is None else []
        for number, start in enumerate(range(0, labels_N.numel(), chunk)):
            part = slice(start, start + chunk)
            given = None if grad_logprobs_N is None else grad_logprobs_N[part]
            slope = None
            if number < len(kept) and given is not None:
                grad_logits = _grad_from_p(kept[number], labels_N[part], given)
            else:
                log_p, slope = _log_softmax(hidden_NH[part], weight_VH, temperature, softcap)
                entropy = None if grad_entropy_N is None else (entropy_N[part], grad_entropy_N[part])
                grad_logits = _grad_logits(log_p, labels_N[part], given, entropy)
            if temperature != 1.0:
                grad_logits /= temperature
            if slope is not None:
                grad_logits *= slope
            if grad_hidden_NH is not None:
                grad_hidden_NH[part] = grad_logits.to(weight_VH.dtype) @ weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH.addmm_(grad_logits.T, hidden_NH[part].to(grad_logits.dtype))
        ctx.kept = []
        grad_weight = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_NH, grad_weight, None, None, None, None


def _log_softmax(
    hidden: Tensor, weight_VH: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return ln p of a chunk, and the slope of the soft cap if there is one."""
    logits = _wide(hidden @ weight_VH.T)
    slope = None
    if softcap is not None:
        bent = torch.tanh(logits / softcap)
        logits, slope = softcap * bent, 1 - bent * bent
    if temperature != 1.0:
        logits = logits / temperature
    return torch.log_softmax(logits, dim=-1), slope


def _grad_from_p(p: Tensor, labels: Tensor, grad_logprobs: Tensor) -> Tensor:
    """Return the gradient of a chunk's scaled logits from its probabilities, which are overwritten."""
    grad = p.mul_(-grad_logprobs[:, None])
    return grad.scatter_add_(-1, labels[:, None], grad_logprobs[:, None])


def _grad_logits(
    log_p: Tensor, labels: Tensor, grad_logprobs: Tensor | None, entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Return the gradient of a chunk's scaled logits; `log_p` is overwritten.

    Args:
        log_p: of the chunk.
        labels: of the chunk.
        grad_logprobs: incoming gradient of the labels' logprobs.
        entropy: the entropies and their incoming gradient.
    """
    p = log_p.exp()
    if entropy is None:
        assert grad_logprobs is not None, "one of the two gradients is there"
        return _grad_from_p(p, labels, grad_logprobs)
    grad = log_p.add_(entropy[0][:, None]).mul_(p).mul_(-entropy[1][:, None])
    if grad_logprobs is not None:
        grad += _grad_from_p(p, labels, grad_logprobs)
    return grad
