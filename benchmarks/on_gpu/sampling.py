"""Tokens a second of the transformers engine on a card, beside `model.generate`, and what one pass does.

The shape is that of Qwen3-0.6B in bfloat16, with 64 and 256 rows of two turns. `launches`, `waits` and
`copies` of a decoding pass say what the host does for it, and `device_ms` how long the card works. With
cuDNN's attention switched on again the engine samples fewer tokens, because each width may take a plan.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import torch
from cells import Bench

sys.path.append(str(Path(__file__).resolve().parents[1]))

from engines import generate, play, played, prompts

from agentenv.engine import TransformersEngine
from agentenv.engine.hf.passes import Passes

TURNS = 2


def by_engine(bench: Bench, rows: int, tokens: int, *, cudnn: bool = False) -> None:
    engine = TransformersEngine(bench.model("0.6B", torch.bfloat16), max_batch=rows)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    starts = prompts(rows, engine.model.config.vocab_size)
    asyncio.run(play(engine, starts[:4], 1, 4, "warm"))
    before, cpu = engine.stats()["decodes"], time.process_time()
    with bench.peak() as memory:
        seconds = sum(asyncio.run(play(engine, starts, TURNS, tokens, "run")))
    bench.tell(
        f"engine, {rows} rows{', with cuDNN' if cudnn else ''}",
        tokens_per_s=rows * TURNS * tokens / seconds,
        ms_per_pass=1e3 * seconds / (engine.stats()["decodes"] - before),
        cpu_seconds=time.process_time() - cpu,
        **memory,
    )
    engine.shutdown()
    torch.backends.cuda.enable_cudnn_sdp(False)


def by_generate(bench: Bench, rows: int, tokens: int, *, cudnn: bool = False) -> None:
    model = bench.model("0.6B", torch.bfloat16)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    starts = prompts(rows, model.config.vocab_size)
    played(generate, model, starts[:4], 1, 4)
    bench.synchronize()
    began = time.perf_counter()
    played(generate, model, starts, TURNS, tokens)
    bench.synchronize()
    seconds = time.perf_counter() - began
    bench.tell(
        f"generate, {rows} rows{', with cuDNN' if cudnn else ''}",
        tokens_per_s=rows * TURNS * tokens / seconds,
        ms_per_pass=1e3 * seconds / (TURNS * tokens),
    )
    torch.backends.cuda.enable_cudnn_sdp(False)


def one_pass(bench: Bench, rows: int) -> None:
    passes = Passes(bench.model("0.6B", torch.bfloat16))
    for _ in range(rows):
        passes.rows.add((), 0, 0)
    passes.run(0, [list(range(5, 105))] * rows)

    def decode() -> Any:
        return passes.run(0, [[7]] * rows)

    seconds = bench.seconds(decode, repeats=10)
    bench.tell(f"one decoding pass of {rows} rows", ms=1e3 * seconds, **bench.profiled(decode, 5, "pass"))


def main() -> None:
    bench = Bench(__doc__)
    few, tokens = (4, 8) if bench.small else (64, 64)
    many = [few] if bench.small else [few, 256]
    for way in (by_engine, by_generate):
        for rows in many:
            with bench.cell(f"{way.__name__}, {rows} rows"):
                way(bench, rows, tokens)
    with bench.cell("one decoding pass"):
        one_pass(bench, few)
    # Last, and with few tokens, because each may take a plan of its own.
    for way in (by_generate, by_engine):
        with bench.cell(f"{way.__name__} with cuDNN"):
            way(bench, few, min(tokens, 24), cudnn=True)
    bench.end()


if __name__ == "__main__":
    main()
