"""Position frequencies that do not depend on which rows share a forward pass.

Dynamic NTK and LongRoPE (Phi-3, Phi-4-mini) choose the frequencies of rotary positions by the longest row of
a pass. The numbers of a row would then depend on its neighbours, and keys that are kept from earlier tokens
would not fit later ones. vLLM computes such models with the frequencies of its context limit, for rows of
any length. The transformers engine and the trainer do the same.
"""

from __future__ import annotations

from typing import Any

import torch

from agentenv.core.context_length import context_length
from agentenv.core.errors import UsageError
from agentenv.core.visible import logger

__all__ = ["context_limit", "fix_frequencies"]

log = logger(__name__)

PROBE_TOKENS = 16


def context_limit(config: Any) -> int | None:
    """Return the context limit of a text model's configuration; None if it names none."""
    return context_length(
        getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None)
    )


def fix_frequencies(model: Any, *, check: bool = True) -> None:
    """Give a model the position frequencies of its context limit, if they depend on the longest row.

    Other models are left as they are. A saved model is unchanged, because frequencies are not saved.

    Args:
        model: a causal language model from transformers.
        check: whether to compare numbers of the model, which it must have its weights for.

    Raises:
        UsageError: The model's numbers still depend on the longest row of a forward pass.
    """
    config = model.config.get_text_config()
    limit = context_limit(config)
    if limit is None:
        return
    fixed = [module for module in model.modules() if _fix(module, limit)]
    if fixed:
        log.warning(
            "%s chooses its position frequencies by the longest row of a forward pass; they are now those "
            "for rows of up to %d tokens in every pass, as in vLLM with this context limit",
            config.model_type,
            limit,
        )
    if check and _depends_on_longest(model, config, limit):
        raise UsageError(
            f"the numbers of a row in the model type {config.model_type!r} depend on the longest row of the "
            "forward pass, so sampled and trained log-probabilities would differ",
            remedy="set max_position_embeddings of its configuration to the length that it was first "
            "trained on, which rules out longer rows",
        )


def _fix(module: Any, limit: int) -> bool:
    """Fix the frequencies of one module; return whether they depended on the longest row."""
    kinds: Any = getattr(module, "rope_type", None)
    if _is_variable(kinds):
        _set_frequencies(module, kinds, limit, layer_type=None)
        module.rope_type = "default"
        return True
    if not isinstance(kinds, dict):
        return False
    variable = [name for name, kind in kinds.items() if _is_variable(kind)]
    for name in variable:
        _set_frequencies(module, kinds[name], limit, layer_type=name)
    module.rope_type = kinds | dict.fromkeys(variable, "default")
    return bool(variable)


def _is_variable(kind: object) -> bool:
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def _set_frequencies(module: Any, kind: str, limit: int, *, layer_type: str | None) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    prefix = "" if layer_type is None else f"{layer_type}_"
    layer = {} if layer_type is None else {"layer_type": layer_type}
    old: torch.Tensor = getattr(module, f"{prefix}inv_freq")
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, old.device, seq_len=limit, **layer)
    module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
    setattr(module, f"{prefix}attention_scaling", scaling)


@torch.no_grad()
def _depends_on_longest(model: Any, config: Any, limit: int) -> bool:
    """Return whether a short row's logits change if a row that reaches the context limit is beside it.

    Both rows have few tokens at distant positions, because only positions select the frequencies.
    """
    first: int = _first_length(config) or limit
    columns = torch.arange(PROBE_TOKENS)
    ids = torch.stack([(7 + 31 * columns) % config.vocab_size, (3 + 17 * columns) % config.vocab_size])
    ends = torch.tensor([[min(first, limit // 2) - 1], [limit - 1]])
    positions = columns * ends // (PROBE_TOKENS - 1)
    given = {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)}
    given = {name: value.to(model.device) for name, value in given.items()}
    model.eval()
    try:
        beside = model(**given, use_cache=False).logits[0].float().log_softmax(-1)
        alone = model(**{name: value[:1] for name, value in given.items()}, use_cache=False).logits[0]
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False  # a model that takes no positions has none to depend on
    gap = (beside - alone.float().log_softmax(-1)).abs().mean() / beside.std()
    return bool(gap > (1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1))


def _first_length(config: Any) -> int | None:
    """Return the length that a model was trained on before its context was extended, if it is named."""
    scaling = getattr(config, "rope_parameters", None) or {}
    return scaling.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
