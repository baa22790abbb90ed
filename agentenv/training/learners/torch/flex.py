"""Attention over a prefix tree by flex attention, which computes its mask block by block and stores none.

Tokens are in depth-first order, so a query sees a key if `key <= query < end[key]`, where `end[key]` is the
end of the descendants of the key's node. The kernel gets one number for each token, and for each block of
128 queries which blocks of 128 keys it sees in full, which in part, and which not at all. The latter are not
computed.

A sliding window counts what lies between two tokens of a row. Their distance in the pack may be larger,
because other rows lie in between, so a window compares depths. An attention sink is one more logit in the
softmax of its head, without a value: it multiplies the output with `sigmoid(lse - sink)`.

On CUDA the kernel is compiled (Triton). Elsewhere PyTorch's reference is used, which holds the scores of all
pairs of tokens and computes no gradients; it is there for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import pad

from agentenv.core.torch_internals import allow_compiled_versions
from agentenv.training.learners.torch.attention import BLOCK, Node
from agentenv.training.rows import to_device

__all__ = ["PackMask", "attend", "pack_mask"]

MOST_VERSIONS = 64
"""Most compiled versions of the kernel. It differs by number format, gradients, windows and soft caps, and
PyTorch compiles one more for the first number of tokens. Beyond the limit PyTorch raises an error."""


class PackMask(flex.BlockMask):
    """The block mask of a pack, which a model hands through to its attention as it does with any mask."""

    window: int | None = None
    """Size of the sliding window that the mask applies."""
    softcap: float | None = None
    """Soft cap of the scores, according to the model's config."""


def pack_mask(
    nodes: Sequence[Node],
    depth_T: Tensor,
    *,
    device: torch.device,
    window: int | None = None,
    softcap: float | None = None,
) -> PackMask:
    """Return the mask of a pack.

    Args:
        nodes: nodes of the prefix tree; each token is in exactly one of them.
        depth_T: depth of each token in its row, in main memory.
        device: device of the model.
        window: number of tokens, itself included, that a token sees; None means all.
        softcap: soft cap of the attention scores.
    """
    end_T = _ends(nodes)
    tokens = len(end_T)
    depth_T = depth_T.to(torch.int32)
    in_part_nn, in_full_nn = _blocks(end_T, depth_T, window)
    lists = [to_device(one, device) for blocks in (in_part_nn, in_full_nn) for one in _ordered(blocks)]
    sees = _sees(to_device(end_T, device), to_device(depth_T, device), window)
    mask = PackMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(tokens, tokens))
    mask.window, mask.softcap = window, softcap
    return mask


def attend(
    module: Any,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    mask: PackMask,
    **options: Any,
) -> Tensor:
    """Return `[1, T, H, D]`: each token's attention to its own row.

    Args:
        module: the attention layer.
        query_1HTD: queries of all tokens, with H heads.
        key_1KTD: keys with K heads, each of which serves H / K query heads.
        value_1KTD: values with K heads.
        mask: mask of the pack.
        options: what transformers passes to an attention function.

    Raises:
        ValueError: The layer does not say that it has the window or the soft cap of the config, or it
            computes something else that flex attention does not.
    """
    sink_H = options.get("s_aux")
    _refuse_unsaid(module, mask, options)
    result: Any = _kernel(query_1HTD.device)(
        query_1HTD,
        key_1KTD,
        value_1KTD,
        score_mod=None if mask.softcap is None else _capped(mask.softcap),
        block_mask=mask,
        scale=options.get("scaling"),
        enable_gqa=query_1HTD.shape[1] != key_1KTD.shape[1],
        # Short queries would take another kernel, and the check at the start has short ones.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        **({} if sink_H is None else _with_lse()),
    )
    if sink_H is None:
        return result.transpose(1, 2).contiguous()
    output_1HTD, rest = result
    lse_1HT: Tensor = getattr(rest, "lse", rest)
    share_1HT = torch.sigmoid(lse_1HT - sink_H.to(lse_1HT.dtype)[None, :, None])
    output_1HTD = (output_1HTD * share_1HT[..., None]).to(output_1HTD.dtype)
    return output_1HTD.transpose(1, 2).contiguous()


def _refuse_unsaid(module: Any, mask: PackMask, options: dict[str, Any]) -> None:
    """Refuse a layer that may compute something else than the mask and the kernel.

    A few short rows at the start would not show a window that is longer, or a soft cap far above the scores.
    """
    for name, expected in (("sliding_window", mask.window), ("softcap", mask.softcap)):
        if options.get(name) != expected:
            raise ValueError(
                f"{type(module).__name__} passes {name}={options.get(name)} to its attention, but the config "
                f"of the model says {expected}"
            )
    if options.get("position_bias") is not None or options.get("dropout"):
        raise ValueError(f"{type(module).__name__} passes a bias or dropout, which packs do not take")


def _kernel(device: torch.device) -> Any:
    return _compiled() if device.type == "cuda" else flex.flex_attention


@cache
def _compiled() -> Any:
    # All models of a process share the versions. Without `fullgraph` PyTorch would turn to its reference at
    # the limit, which holds the scores of all pairs of tokens.
    allow_compiled_versions(MOST_VERSIONS)
    return torch.compile(flex.flex_attention, fullgraph=True)


def _with_lse() -> dict[str, Any]:
    """Return the arguments by which flex attention also returns the log-sum-exp of each query's scores."""
    request: Any = getattr(flex, "AuxRequest", None)  # since torch 2.9
    return {"return_lse": True} if request is None else {"return_aux": request(lse=True)}


def _capped(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _ends(nodes: Sequence[Node]) -> Tensor:
    """Return for each token the end of the descendants of its node, `[T]`."""
    ordered = sorted(nodes)
    sizes = torch.tensor([node.stop - node.start for node in ordered])
    return torch.repeat_interleave(torch.tensor([node.end for node in ordered], dtype=torch.int32), sizes)


def _sees(end_T: Tensor, depth_T: Tensor, window: int | None) -> Callable[..., Tensor]:
    """Return the function that says whether a query sees a key."""

    def in_row(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end_T[key])

    if window is None:
        return in_row
    beyond_T = depth_T + window

    def in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end_T[key]) & (depth_T[query] < beyond_T[key])

    return in_window


def _blocks(end_T: Tensor, depth_T: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Return which blocks of queries (rows) see which blocks of keys (columns) in part, and which in full.

    All pairs of a block below the diagonal have `key < query`, so its first and its last query decide. With a
    window, a block counts as seen in part if its depths do not exclude that.
    """
    count = -(-len(end_T) // BLOCK)
    missing = count * BLOCK - len(end_T)
    end_nb = pad(end_T, (0, missing)).view(count, BLOCK)
    numbers_n = torch.arange(count)
    first_n1 = numbers_n[:, None] * BLOCK
    below_nn = numbers_n[:, None] > numbers_n
    seen_nn = below_nn & (end_nb.amax(1) > first_n1)
    # What follows the last token is nowhere seen, so the last block of queries sees none in full.
    full_nn = below_nn & (end_nb.amin(1) >= first_n1 + BLOCK)
    if window is not None:
        depth_nb = torch.cat([depth_T, depth_T[-1:].expand(missing)]).view(count, BLOCK)
        low_n, high_n = depth_nb.amin(1), depth_nb.amax(1)
        seen_nn &= low_n[:, None] - high_n < window
        full_nn &= high_n[:, None] - low_n < window
    return (seen_nn & ~full_nn) | torch.eye(count, dtype=torch.bool), full_nn


def _ordered(blocks_nn: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row has, and their numbers at the beginning of a row."""
    numbers_nn = torch.argsort(blocks_nn.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks_nn.sum(-1, dtype=torch.int32)[None, None], numbers_nn.to(torch.int32)[None, None]
