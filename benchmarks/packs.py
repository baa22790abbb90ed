"""Attention over a packed group: flex attention, a mask of all pairs, and padded rows.

    python benchmarks/packs.py --device cuda --json build/packs.json
    python benchmarks/packs.py --device cpu --quick           # tries the same code without a GPU, in small

A group is a prompt of half the pack and eight completions, in one attention layer of the shape of Qwen3-8B
(32 heads, 8 of them with keys, of 128 numbers). `ms` is a forward and a backward pass, `MB` the most memory
beyond the inputs, and `off` the relative distance of the gradients from those under the mask in float32, at
the smallest size. On the CPU only the forward pass runs, because PyTorch has no other there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentenv.training.learners.torch.attention import Node
from agentenv.training.learners.torch.flex import attend, pack_mask

HEADS, KEY_HEADS, WIDTH, MEMBERS = 32, 8, 128, 8
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def group(tokens: int) -> tuple[tuple[Node, ...], Tensor]:
    """Return the nodes of a prompt with completions, and the depths of their tokens."""
    prompt, own = tokens // 2, tokens // 2 // MEMBERS
    starts = [prompt + own * member for member in range(MEMBERS)]
    nodes = (Node(0, prompt, prompt + own * MEMBERS), *(Node(at, at + own, at + own) for at in starts))
    return nodes, torch.cat([torch.arange(prompt), *[torch.arange(prompt, prompt + own)] * MEMBERS])


def by_flex(nodes: tuple[Node, ...], depths: Tensor, device: torch.device) -> Attention:
    """Return flex attention, which makes its mask once for all layers."""
    mask = pack_mask(nodes, depths, device=device)
    return lambda query, key, value: attend(None, query, key, value, mask).transpose(1, 2)


def block_mask(nodes: tuple[Node, ...]) -> Tensor:
    """Return a mask `[T, T]` that is true if a query (row) sees a key (column)."""
    size = max(node.stop for node in nodes)
    keep = torch.zeros(size, size, dtype=torch.bool)
    for start, stop, end in nodes:
        keep[start:stop, start:stop] = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        keep[stop:end, start:stop] = True
    return keep


def by_mask(nodes: tuple[Node, ...], _: Tensor, device: torch.device) -> Attention:
    """Return attention under a mask of all pairs."""
    keep = block_mask(nodes).to(device)
    return partial(scaled_dot_product_attention, attn_mask=keep, enable_gqa=True)


def by_rows(nodes: tuple[Node, ...], depths: Tensor, _: torch.device) -> Attention:
    """Return plain causal attention of the rows, each with its own copy of the prompt."""
    prompt, own = nodes[0].stop, nodes[1].stop - nodes[1].start

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def rows(one: Tensor) -> Tensor:
            parts = one[:, :, prompt:].unflatten(2, (MEMBERS, own))[0].transpose(0, 1)
            return torch.cat([one[:, :, :prompt].expand(MEMBERS, -1, -1, -1), parts], 2)

        parts = rows(query), rows(key), rows(value)
        return scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)

    return attention


WAYS = {"flex attention": by_flex, "mask of all pairs": by_mask, "padded rows": by_rows}


def passes(attention: Attention, inputs: list[Tensor]) -> list[Tensor]:
    """Make a forward and a backward pass; return the gradients."""
    if inputs[0].device.type == "cpu":
        with torch.no_grad():
            return [attention(*inputs)]
    return list(torch.autograd.grad(attention(*inputs).float().square().sum(), inputs))


def measured(attention: Attention, inputs: list[Tensor], repeats: int) -> dict[str, float]:
    """Return milliseconds and megabytes of a pass."""
    cuda = inputs[0].device.type == "cuda"
    passes(attention, inputs)  # compiles
    before = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    for _ in range(repeats):
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        passes(attention, inputs)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    found = {"ms": 1e3 * statistics.median(seconds)}
    return found | {"MB": (torch.cuda.max_memory_allocated() - before) / 1e6} if cuda else found


def off(attention: Attention, truth: Attention, inputs: list[Tensor]) -> float:
    """Return the relative distance of a pass from the one under the mask in float32."""
    wide = [one.detach().float().requires_grad_() for one in inputs]
    pairs = zip(passes(attention, inputs), passes(truth, wide), strict=True)
    return max(float((ours.float() - right).norm() / right.norm()) for ours, right in pairs)


def row(name: str, tokens: int, device: torch.device, repeats: int, *, compared: bool) -> dict[str, Any]:
    """Return the figures of one way at one size."""
    nodes, depths = group(tokens)
    draw = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = [
        torch.randn(1, heads, tokens, WIDTH, device=device, dtype=dtype, generator=draw).requires_grad_(
            device.type == "cuda"
        )
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    found: dict[str, Any] = {"way": name, "tokens": tokens}
    try:
        attention = WAYS[name](nodes, depths, device)
        found |= measured(attention, inputs, repeats)
        if compared and name == "flex attention":
            found["off"] = off(attention, by_mask(nodes, depths, device), inputs)
    except torch.OutOfMemoryError:
        found["failed"] = "out of memory"
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="one small size and few repeats")
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384, 32768])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    sizes = [1024] if given.quick else given.tokens
    repeats, device = 2 if given.quick else 10, torch.device(given.device)
    found: list[dict[str, Any]] = []
    for tokens in sizes:
        for name in WAYS:
            found.append(row(name, tokens, device, repeats, compared=tokens == min(sizes)))
            print(found[-1], flush=True)
            if given.json:  # after each, so that a run that is broken off leaves what was measured
                given.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
