"""What the card does by itself: products, copies, launches, and attention of a decoding pass.

The rate of bfloat16 products is what a trainer's step is measured by. Attention is decoded with a width that
grows by one, as an engine's does, with the kernels of cuDNN and without: in torch 2.11 they come first on
Hopper and make a plan for each new width, which `ms_new_width` beside `ms_again` shows.
"""

from __future__ import annotations

import os
import platform
import statistics
import time

import torch
import transformers
from cells import Bench
from torch.nn.functional import scaled_dot_product_attention


def machine(bench: Bench) -> None:
    told = {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
    told["transformers"] = transformers.__version__
    if bench.cuda:
        one = torch.cuda.get_device_properties(0)
        told |= {"gpu": one.name, "GB": one.total_memory / 1e9, "cudnn": torch.backends.cudnn.version()}
    bench.tell("machine", **told)


def products(bench: Bench) -> None:
    size = 256 if bench.small else 8192
    for name, dtype, tf32 in (
        ("bfloat16", torch.bfloat16, False),
        ("float32", torch.float32, False),
        ("tf32", torch.float32, True),
    ):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        left, right = (torch.randn(size, size, device=bench.device).to(dtype) for _ in range(2))
        seconds = bench.seconds(lambda left=left, right=right: left @ right, repeats=5, warm=2)
        bench.tell(f"product {name}", TFLOPs=2 * size**3 / seconds / 1e12)
    torch.backends.cuda.matmul.allow_tf32 = False


def small_things(bench: Bench) -> None:
    source = torch.randn(2**20 if bench.small else 2**28, device=bench.device)
    target = torch.empty_like(source)
    bench.tell("copy", TBs=2 * source.nbytes / bench.seconds(lambda: target.copy_(source)) / 1e12)
    few = torch.zeros(8, device=bench.device)

    def launches() -> None:
        for _ in range(1000):
            few.add_(1)

    def lists() -> None:
        for _ in range(100):
            torch.tensor([1.0] * 64, device=bench.device)

    bench.tell("launch", us=bench.seconds(launches) * 1e3)
    bench.tell("a list of 64 numbers to the device", us=bench.seconds(lists) * 1e4)


def decode_attention(bench: Bench, *, cudnn: bool) -> None:
    rows, widths = (4, range(300, 303)) if bench.small else (64, range(300, 330))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    given = {"device": bench.device, "dtype": torch.bfloat16}
    keys, queries = torch.randn(rows, 8, 1024, 128, **given), torch.randn(rows, 8, 2, 128, **given)
    new: list[float] = []
    again: list[float] = []
    for width in widths:
        mask = torch.zeros(rows, 1, 1, width, **given)
        for kept in (new, again):
            bench.synchronize()
            began = time.perf_counter()
            part = keys[:, :, :width]
            scaled_dot_product_attention(queries, part, part, attn_mask=mask)
            bench.synchronize()
            kept.append(time.perf_counter() - began)
    torch.backends.cuda.enable_cudnn_sdp(before)
    named = f"decoding attention {'with' if cudnn else 'without'} cuDNN"
    bench.tell(
        named, ms_new_width=1e3 * statistics.median(new[2:] or new), ms_again=1e3 * statistics.median(again)
    )


def main() -> None:
    bench = Bench(__doc__)
    machine(bench)
    with bench.cell("products"):
        products(bench)
    with bench.cell("copies and launches"):
        small_things(bench)
    for cudnn in (True, False):
        with bench.cell("decoding attention"):
            decode_attention(bench, cudnn=cudnn)
    bench.end()


if __name__ == "__main__":
    main()
