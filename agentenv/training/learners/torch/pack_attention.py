"""How a model attends over a pack: what its device and its layers allow, and how it is asked to do so.

Each device has one way: `tree` has the kernels of the CPU, `flex` the compiled ones of CUDA. Both hold
nothing for pairs of tokens. Rows of models that cannot take the way of their device are padded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agentenv.core.errors import UsageError
from agentenv.core.torch_internals import has_attention_with_sums
from agentenv.core.transformers_internals import attention_of, supports_sdpa
from agentenv.training.learners.torch.attention import Node, Way, tree_attention

__all__ = ["enable_packs", "holds_pairs", "is_eager", "pack_inputs", "refuse_lost_soft_cap", "unpackable"]

SUFFIX = "+packs"
EAGER = "eager_attention_forward"

UNSUPPORTED = ("position_bias", "s_aux", "sliding_window", "softcap")
"""Arguments by which some models change attention, and which tree attention does not support."""


def unpackable(base: Any, text: Any, device: torch.device) -> str:
    """Return why the rows of a model cannot be packed on a device; empty if they can.

    Args:
        base: the causal language model.
        text: its text config.
        device: device of the model.
    """
    kinds = set(getattr(text, "layer_types", None) or ())
    others = kinds - {"full_attention", "sliding_attention"}
    if others:
        return f"layers of kind {sorted(others)} do not keep the rows of a pack apart"
    eager = "eager attention keeps the scores of all pairs of tokens"
    if device.type == "cuda":
        files = (sys.modules[kind.__module__] for kind in type(base).__mro__)
        return "" if not is_eager(text) or any(hasattr(file, EAGER) for file in files) else eager
    if is_eager(text):
        capped = getattr(text, "attn_logit_softcapping", None) is not None
        return f"{eager}; load the model with sdpa" if supports_sdpa(base) and not capped else eager
    if _sliding_layers(text) or (not kinds and getattr(text, "sliding_window", None)):
        return "attention over a tree has no sliding window"
    if device.type != "cpu" or not has_attention_with_sums():
        return f"torch {torch.__version__} has no attention over a tree on {device.type}"
    return ""


def is_eager(text: Any) -> bool:
    """Return whether a model's own attention computes the scores of all pairs of tokens as a matrix."""
    return attention_of(text).removesuffix(SUFFIX) in {"eager", ""}


def refuse_lost_soft_cap(text: Any) -> None:
    """Refuse an attention that ignores the cap of its scores, which every engine applies (Gemma 2).

    Raises:
        UsageError: The attention ignores the cap.
    """
    name = attention_of(text)
    applied = is_eager(text) or "flash" in name or "flex" in name
    if getattr(text, "attn_logit_softcapping", None) is not None and not applied:
        raise UsageError(
            f"the attention {name!r} ignores the soft cap of this model's attention scores",
            remedy="load the model with attn_implementation='eager'",
        )


def holds_pairs(text: Any) -> bool:
    """Return whether a model's own attention over one row holds something for each pair of its tokens.

    With a sliding window that is a mask, which transformers makes.
    """
    return is_eager(text) or bool(getattr(text, "sliding_window", None))


def pack_inputs(  # noqa: PLR0917 - of the policy alone
    base: Any, text: Any, way: Way, nodes: Sequence[Node], depth_T: Tensor, device: torch.device
) -> dict[str, Any]:
    """Return the arguments by which a model attends over a pack in this way.

    Args:
        base: the causal language model.
        text: its text config.
        way: how to attend.
        nodes: nodes of the prefix tree.
        depth_T: depth of each token in its row, in main memory.
        device: device of the model.
    """
    enable_packs(base)
    if way == "tree":
        # The model makes no mask of its own if it gets one of four dimensions. Tree attention ignores it.
        return {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool), "tree": nodes}
    from agentenv.training.learners.torch.flex import pack_mask

    make = partial(
        pack_mask,
        nodes,
        depth_T,
        device=device,
        softcap=getattr(text, "attn_logit_softcapping", None),
    )
    if _sliding_layers(text):
        masks = {"full_attention": make(), "sliding_attention": make(window=text.sliding_window)}
        return {"attention_mask": masks}
    window = None if getattr(text, "layer_types", None) else getattr(text, "sliding_window", None)
    return {"attention_mask": make(window=window)}


def _sliding_layers(text: Any) -> bool:
    return "sliding_attention" in (getattr(text, "layer_types", None) or ())


def enable_packs(model: Any) -> None:
    """Make a model's attention take `tree=nodes` or a `PackMask`; without them it is unchanged.

    Args:
        model: a model from transformers, with any attention function of its interface.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = attention_of(model.config)
    if name.endswith(SUFFIX):
        return
    inner = _eager if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    AttentionInterface.register(name + SUFFIX, partial(_forward, inner))
    AttentionMaskInterface.register(name + SUFFIX, ALL_MASK_ATTENTION_FUNCTIONS[name])
    model.set_attn_implementation(name + SUFFIX)


def _eager(module: Any, *args: Any, **options: Any) -> Any:
    """Call the eager attention of a model, which is a function in the file of its layers."""
    files = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    function: Any = next(file.eager_attention_forward for file in files if hasattr(file, EAGER))
    return function(module, *args, **options)


def _forward(  # noqa: PLR0917 - transformers' signature
    inner: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    tree: Sequence[Node] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function for transformers: inputs have heads in dimension 1, results in dimension 2."""
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        from agentenv.training.learners.torch.flex import (  # loaded where masks are no tensors
            PackMask,
            attend,
        )

        if isinstance(attention_mask, PackMask):
            return attend(module, query, key, value, attention_mask, **options), None
    if tree is None:
        return inner(module, query, key, value, attention_mask, **options)
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ValueError(f"{type(module).__name__} passes {name}, which tree attention does not support")
    return tree_attention(query, key, value, tree, scale=options.get("scaling")), None
