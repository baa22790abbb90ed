"""Steps of a trainer on a card: groups on a shared prompt, the LM head, the optimiser, and TRL's step.

Forward and backward passes of one group of 8 with gradient checkpoints, in the shapes of Qwen3-0.6B (1,024 +
1,024 tokens) and 1.7B (2,048 + 1,024) in bfloat16: agentenv's, packed by flex attention on a card, and plain
ones of padded rows. `useful_TFLOPs` counts 6 operations for each weight and computed token, those of the head
for trained tokens alone, and nothing for what checkpoints compute again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from cells import COMMON, SHAPES, SMALL, Bench, group_rows

from agentenv.training import GRPOConfig, grpo_loss
from agentenv.training.learners.torch import Policy
from agentenv.training.learners.torch.logprob import chunked_logprobs
from agentenv.training.learners.torch.optim import MasterOptimizer
from agentenv.training.learners.torch.passes import accumulate, micro_batches
from agentenv.training.metrics import Meter
from agentenv.training.rows import Row
from agentenv.training.step import assign_weights

sys.path.append(str(Path(__file__).resolve().parents[1]))

COUNT = 8


def ours(bench: Bench, model: Any, rows: list[Row]) -> tuple[Callable[[], object], int]:
    """Return agentenv's passes over a group, and how many tokens they compute."""
    options = {"gradient_checkpointing": True, "tokens_per_micro_batch": 16_384}
    config = GRPOConfig(old_logprobs="recompute", device=bench.device, dtype="bfloat16", **options)
    policy = Policy(model, config)
    rows = assign_weights(rows, config)
    tokens = sum(micro.num_tokens for micro in micro_batches(policy, rows))
    return lambda: accumulate(policy, rows, Meter(), clear=model.zero_grad), tokens


def padded(bench: Bench, model: Any, rows: list[Row]) -> tuple[Callable[[], object], int]:
    """Return plain passes over padded rows, two at a time: the logits of more might not fit."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    width = max(len(row.token_ids) for row in rows)
    prompt = int(rows[0].positions_n[0])
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    live = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row.token_ids)] = torch.tensor(row.token_ids)
        live[number, : len(row.token_ids)] = 1
    parts = list(zip(ids.to(bench.device).split(2), live.to(bench.device).split(2), strict=True))

    def call() -> None:
        model.zero_grad()
        for ids_BT, live_BT in parts:
            out = model(ids_BT, attention_mask=live_BT, logits_to_keep=width - prompt + 1, use_cache=False)
            wide = out.logits[:, :-1].float().log_softmax(-1)
            logprobs = wide.gather(-1, ids_BT[:, prompt:, None]).squeeze(-1)
            mask = live_BT[:, prompt:].bool()
            grpo_loss(
                logprobs,
                old_logprobs=logprobs.detach(),
                advantages=torch.ones_like(logprobs),
                weights=torch.full_like(logprobs, 1 / logprobs.numel()),
                config=GRPOConfig(),
                loss_mask=mask,
            ).loss.backward()

    return call, sum(len(row.token_ids) for row in rows)


def group_step(bench: Bench, shape: str, prompt: int, length: int, way: Any) -> None:
    if bench.small:
        prompt, length = 40, 24
    model = bench.model(shape, torch.bfloat16)
    rows = group_rows(COUNT, prompt, length, model.config.vocab_size)
    call, tokens = way(bench, model, rows)
    call()  # compiles
    with bench.peak() as memory:
        seconds = bench.seconds(call)
    head = model.lm_head.weight.numel()
    body = sum(one.numel() for one in model.parameters()) - head
    useful = 6 * (body * tokens + head * sum(row.num_trained for row in rows))
    told = {"seconds": seconds, "tokens": tokens, "useful_TFLOPs": useful / seconds / 1e12, **memory}
    device = bench.profiled(call, 1, f"{shape}-{way.__name__}") if shape == "0.6B" else {}
    bench.tell(f"{way.__name__} {shape} {prompt}+{length}x{COUNT}", **told, **device)


def head(bench: Bench) -> None:
    """Measure agentenv's head alone in chunks, and one plain log-softmax of all logits in parts."""
    sizes = SMALL if bench.small else COMMON | SHAPES["0.6B"]
    vocabulary, hidden, count = sizes["vocab_size"], sizes["hidden_size"], 100 if bench.small else 8192
    given = {"device": bench.device, "dtype": torch.bfloat16, "requires_grad": True}
    weight, states = torch.empty(vocabulary, hidden, **given), torch.empty(count, hidden, **given)
    with torch.no_grad():
        weight.normal_(std=0.02)
        states.normal_()
    labels = torch.randint(0, vocabulary, (count,), device=bench.device)

    def chunks(size: int) -> None:
        logprobs, _ = chunked_logprobs(states, weight, labels, chunk=size)
        torch.autograd.grad(logprobs.sum(), (states, weight))

    def plain() -> None:
        for part in states.split(2048):
            logits = (part @ weight.T).float().log_softmax(-1)
            torch.autograd.grad(logits.gather(1, labels[: len(part), None]).sum(), (states, weight))

    for size in (256, 1024):
        bench.tell(f"head in chunks of {size}", ms=1e3 * bench.seconds(lambda size=size: chunks(size)))
    bench.tell("head, plain in parts of 2048", ms=1e3 * bench.seconds(plain))


def optimiser(bench: Bench, kernel: str) -> None:
    """Measure a step of AdamW over a model with this kernel."""
    model = bench.model("1.7B", torch.bfloat16)
    made = MasterOptimizer(model.named_parameters(), GRPOConfig(dtype="bfloat16", device=bench.device))
    kept = [
        {name: value for name, value in group.items() if name not in {"foreach", "fused"}}
        for group in made.inner.param_groups
    ]
    made.inner = torch.optim.AdamW(kept, **{kernel: True})

    def call() -> None:
        for one in made.masters:
            one.grad = torch.full_like(one, 1e-4)
        made.step(1e-6)

    call()
    with bench.peak() as memory:
        seconds = bench.seconds(call)
    bench.tell(f"AdamW {kernel}", seconds=seconds, **memory)


def beside_trl(bench: Bench, how: str) -> None:
    """Measure the whole step of one way, without gradient checkpoints."""
    import trainer

    trainer.SHAPES["0.6B"] = SMALL if bench.small else COMMON | SHAPES["0.6B"]
    cell = trainer.Cell("0.6B", "bfloat16", *((32, 16, 4) if bench.small else (1024, 512, 8)))
    model = trainer.build_model(cell, "bfloat16", bench.device)
    call = trainer.STEPS[how](model, trainer.build_batch(cell))
    call()
    with bench.peak() as memory:
        seconds = bench.seconds(call)
    bench.tell(f"{how}, {cell.name}", seconds=seconds, **memory)


def main() -> None:
    bench = Bench(__doc__)
    for shape, prompt, length in (("0.6B", 1024, 1024), ("1.7B", 2048, 1024)):
        for way in (ours, padded):
            with bench.cell(f"{way.__name__} {shape}"):
                group_step(bench, shape, prompt, length, way)
    with bench.cell("head"):
        head(bench)
    for kernel in ("fused", "foreach"):
        with bench.cell(f"AdamW {kernel}"):
            optimiser(bench, kernel)
    for how in ("ours", "plain", "trl"):
        if how == "trl" and find_spec("trl") is None:
            bench.tell("TRL's step", left_out="trl is not installed")
            continue
        with bench.cell(f"{how} beside TRL"):
            beside_trl(bench, how)
    bench.end()


if __name__ == "__main__":
    main()
