"""Whether what is sampled and what is trained agree with plain passes, in float32 and bfloat16.

1. Uneven episodes of two turns are sampled by the transformers engine. Their log-probabilities are compared
   with one plain unpadded pass for each, and in bfloat16 also with the same pass in float32, beside which the
   plain pass in bfloat16 shows the noise of the format itself.
2. Scores and gradients of a packed group, and of padded rows, are compared with padded rows in float32.
"""

from __future__ import annotations

import asyncio
import copy
import math
import random
import time
from typing import Any

import torch
from cells import Bench, gaps, group_rows

from agentenv.engine import Sampling, TransformersEngine
from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import Policy, pack_rows
from agentenv.training.learners.torch.packing import pad_rows

Sampled = tuple[list[list[int]], list[int], list[float]]
"""Contexts with their completions, where each completion begins, and all log-probabilities."""


def sampled(bench: Bench, engine: Any, count: int, tokens: int, **cuts: float) -> Sampled:
    """Sample two turns of uneven episodes, of which four have equal prompts."""
    top = engine.model.config.vocab_size

    async def episode(number: int) -> list[tuple[list[int], int, tuple[float, ...]]]:
        draw = random.Random(number % max(1, count // 4))
        size = 20 + draw.randrange(20 if bench.small else 180)
        context = [draw.randrange(1, top) for _ in range(size)]
        rows = []
        for turn in range(2):
            asked = Sampling(max_tokens=tokens - number % 7, seed=100 * number + turn, **cuts)
            done = await engine.generate(context, asked, stop_token_ids=(), session_id=str(number))
            whole = [*context, *done.token_ids]
            rows.append((whole, len(context), tuple(done.logprobs)))
            context = [*whole, *(draw.randrange(1, top) for _ in range(9))]
        return rows

    async def episodes() -> list[tuple[list[int], int, tuple[float, ...]]]:
        return [row for rows in await asyncio.gather(*map(episode, range(count))) for row in rows]

    rows = asyncio.run(episodes())
    return [row[0] for row in rows], [row[1] for row in rows], [one for row in rows for one in row[2]]


@torch.no_grad()
def plain(model: Any, rows: list[list[int]], firsts: list[int]) -> list[float]:
    """Return the log-probabilities of sampled tokens by one plain unpadded pass for each row."""
    found: list[float] = []
    for ids, first in zip(rows, firsts, strict=True):
        whole = torch.tensor([ids], device=model.device)
        logits = model(input_ids=whole, use_cache=False).logits[0, first - 1 : -1].float()
        found += logits.log_softmax(-1).gather(1, whole[0, first:, None])[:, 0].tolist()
    return found


def sampler(bench: Bench, name: str) -> None:
    model = bench.model("0.6B", getattr(torch, name), peaked=True)
    twin = copy.deepcopy(model)
    engine = TransformersEngine(model)
    count, tokens = (6, 10) if bench.small else (24, 64)
    began = time.perf_counter()
    rows, firsts, ours = sampled(bench, engine, count, tokens)
    bench.tell(f"sampled in {name}", tokens=len(ours), seconds=time.perf_counter() - began)
    same = plain(twin, rows, firsts)
    bench.tell(f"sampler in {name} against a plain pass in it", **gaps(ours, same))
    if name != "float32":
        wide = plain(twin.float(), rows, firsts)
        bench.tell(f"a plain pass in {name} against float32", **gaps(same, wide))
        bench.tell(f"sampler in {name} against float32", **gaps(ours, wide))
    *_, cut = sampled(bench, engine, 4, tokens, top_p=0.9, temperature=0.7)
    bench.tell(f"cut by top_p in {name}", finite=sum(map(math.isfinite, cut)) / len(cut))
    engine.shutdown()


def packs(bench: Bench, name: str) -> None:
    model = bench.model("0.6B", torch.bfloat16, layers=None if bench.small else 8)
    prompt, length = (30, 20) if bench.small else (700, 300)
    rows = group_rows(6, prompt, length, model.config.vocab_size)

    def found(model: Any, layout: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        dtype = str(model.dtype).removeprefix("torch.")
        policy = Policy(model, GRPOConfig(device=bench.device, dtype=dtype))
        model.zero_grad()
        began = time.perf_counter()
        scores, _ = policy.score(pad_rows(rows) if layout == "padded" else pack_rows(rows))
        signs = torch.arange(len(scores), device=scores.device).remainder(3).sub(1)
        (scores * signs).sum().backward()
        grads = [one.grad.to_dense().flatten().float() for one in model.parameters() if one.grad is not None]
        bench.synchronize()
        return scores.detach().double().cpu(), torch.cat(grads), time.perf_counter() - began

    truth, slope, _ = found(copy.deepcopy(model).float(), "padded")
    model = model.to(getattr(torch, name))
    for layout in ("padded", "packed"):
        scores, grad, seconds = found(model, layout)
        off = float((grad - slope).norm() / slope.norm())
        bench.tell(
            f"{layout} rows in {name} against padded in float32",
            **gaps(scores, truth),
            gradient=off,
            seconds=seconds,
        )


def at_the_start(bench: Bench, name: str) -> None:
    model = bench.model("0.6B", getattr(torch, name), layers=None if bench.small else 2)
    policy = Policy(model, GRPOConfig(device=bench.device, dtype=name))
    began = time.perf_counter()
    said = policy.check()
    told = {"way": policy.way, "head": policy.head_way, "said": said, "seconds": time.perf_counter() - began}
    bench.tell(f"check at the start in {name}", **told)


def main() -> None:
    bench = Bench(__doc__)
    for part in (sampler, packs, at_the_start):
        for name in ("float32", "bfloat16"):
            with bench.cell(f"{part.__name__} in {name}"):
                part(bench, name)
    bench.end()


if __name__ == "__main__":
    main()
