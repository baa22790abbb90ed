"""The LM head of a model: its matrix with what is added and multiplied, or else the model's own forward.

Three ways lead to the log-probabilities of trained tokens, the cheapest first. A check at the start compares
them, so a model gets the first that is exact for it.

1. `matrix`: the head is one matrix, perhaps with a bias, one factor or a final soft cap. Chunks of trained
   positions pass it, and their gradients are computed by hand.
2. `own`: the model's own forward computes the logits of chunks of trained positions from the last hidden
   states, whatever it does there, such as adapters on the head. Logits are computed again for gradients.
3. `whole`: the model computes the logits of all positions, which takes memory for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentenv.training.learners.torch.logprob import plain_logprobs
from agentenv.training.rows import TokenSupports

__all__ = ["HeadWay", "factor_of", "is_matrix", "own_head", "own_logprobs"]

HeadWay: TypeAlias = Literal["matrix", "own", "whole"]
OWN_CHUNK = 64
"""Number of trained tokens whose logits a model's own forward computes at once."""
FACTORS = {"logits_scaling": -1, "logit_scale": 1, "lm_head_multiplier": 1}
"""Names in configurations of what logits are multiplied by, and its power: Granite; Cohere; Falcon-H1."""


def is_matrix(head: Any) -> bool:
    """Return whether a head is one matrix, perhaps with a bias."""
    return type(head) is nn.Linear


def factor_of(text: Any) -> float:
    """Return what the logits are multiplied by, as a model's configuration says."""
    factor = 1.0
    for name, power in FACTORS.items():
        factor *= float(getattr(text, name, None) or 1.0) ** power
    return factor


def own_head(
    base: nn.Module, decoder: nn.Module, inputs: Mapping[str, Any], outputs: Any
) -> Callable[[Tensor], Tensor]:
    """Return a function of last hidden states to logits: what a model's own forward does after its decoder.

    It runs in a shallow copy of the model, because an engine may sample from the model at the same time.

    Args:
        base: the model.
        decoder: the part of the model below its head.
        inputs: what the decoder was called with.
        outputs: what the decoder returned.
    """
    path = next(name for name, module in base.named_modules() if module is decoder)
    shell: Any = _shallow(base)
    part = shell
    for name in path.split("."):
        children = vars(part)["_modules"]
        children[name] = part = _shallow(children[name])

    def logits(hidden_nH: Tensor) -> Tensor:
        part.forward = partial(_told, replace(outputs, last_hidden_state=hidden_nH[None]))
        return shell.forward(**inputs).logits[0]

    return logits


def _told(outputs: Any, *_args: Any, **_options: Any) -> Any:
    return outputs


def _shallow(module: nn.Module) -> Any:
    """Return a copy of a module with the same parts, each of which can be replaced in the copy alone."""
    copied = object.__new__(type(module))  # a sharded module cannot be copied by `copy`
    vars(copied).update(vars(module), _modules=dict(vars(module)["_modules"]))
    return copied


def own_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden_NH: Tensor,
    labels_N: Tensor,
    *,
    temperature: float,
    supports: TokenSupports | None,
    banned: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return the same as `chunked_logprobs`, through a head of any kind."""

    def score(part: slice) -> tuple[Tensor, Tensor]:
        kept = None if supports is None else supports.part(part)
        return plain_logprobs(
            head(hidden_NH[part]), labels_N[part], temperature=temperature, supports=kept, banned=banned
        )

    starts = range(0, labels_N.numel(), OWN_CHUNK)
    scored: list[tuple[Tensor, Tensor]] = [
        checkpoint(score, slice(start, start + OWN_CHUNK), use_reentrant=False, preserve_rng_state=False)
        for start in starts
    ]
    logprobs, entropies = zip(*scored, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
