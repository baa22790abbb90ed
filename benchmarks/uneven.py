"""Measure what a long row costs the short rows beside it in the transformers engine, and what a group shares.

    OMP_NUM_THREADS=1 python benchmarks/uneven.py
    OMP_NUM_THREADS=1 python benchmarks/uneven.py --quick --json uneven.json

Each case plays in a process of its own: rows of these lengths are prefilled and then decode together. The
time is that of one decoding pass; its parts are a pass of the short rows and a pass of the long one.
A group has one prompt, which is computed and held once; strangers have prompts of the same length.
The memory is what the process takes at most, less what it has after loading.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agentenv.engine import Engine, Sampling, TransformersEngine
from agentenv.engine.hf import load_model, locate

SHORT = [(100, number) for number in range(1, 16)]
CASES = {
    "short": SHORT,
    "long": [(4000, 0)],
    "together": [(4000, 0), *SHORT],
    "group": [(2000, 0)] * 8,
    "strangers": [(2000, number) for number in range(8)],
}
"""For each row the tokens of its prompt and which prompt it is."""


async def sampled(engine: Engine, contexts: list[list[int]], tokens: int, tag: str) -> float:
    """Let each row sample so many tokens, which are appended to it; return the seconds of the processor."""
    began = time.process_time()
    done = await asyncio.gather(
        *(
            engine.generate(
                context, Sampling(max_tokens=tokens, seed=row), stop_token_ids=(), session_id=f"{tag}{row}"
            )
            for row, context in enumerate(contexts)
        )
    )
    for context, completion in zip(contexts, done, strict=True):
        assert len(completion.token_ids) == tokens
        context.extend(completion.token_ids)
    return time.process_time() - began


def peak(*, anew: bool = False) -> int:
    """Return the most bytes of memory that this process held since it was last asked to count anew."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def play(model: str, rows: list[tuple[int, int]], passes: int) -> dict[str, float]:
    """Return the seconds of the prefill, the milliseconds of a pass and the megabytes of the rows."""
    engine = TransformersEngine(load_model(locate(model), dtype="float32"), kept_bytes=1 << 32)
    contexts = [[17 + (which * 7919 + at * 31) % 40_000 for at in range(n)] for n, which in rows]

    async def measured() -> dict[str, float]:
        await sampled(engine, [[17, 18, 19]], 2, "warm")
        before = peak(anew=True)
        prefill_s = await sampled(engine, contexts, 1, "row")
        # The second turn finds the keys and values of the first.
        decode_s = await sampled(engine, contexts, passes, "row")
        return {
            "prefill_s": prefill_s,
            "pass_ms": decode_s / passes * 1000,
            "mb": (peak() - before) / 1e6,
        }

    return asyncio.run(measured())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    passes = 10 if options.quick else 40
    if options.case:
        print(json.dumps(play(options.model, CASES[options.case], passes)))
        return
    table: dict[str, Any] = {}
    for case, rows in CASES.items():
        command = [sys.executable, __file__, "--case", case, "--model", options.model]
        said = subprocess.run(
            [*command, *(["--quick"] if options.quick else [])], capture_output=True, text=True, check=True
        )
        table[case] = json.loads(said.stdout.splitlines()[-1])
        print(
            f"{case:<10}{len(rows):>3} rows, {sum(tokens for tokens, _ in rows):>5} tokens: prefill "
            f"{table[case]['prefill_s']:5.1f} s, {table[case]['pass_ms']:8.1f} ms a pass, "
            f"{table[case]['mb']:7.0f} MB",
            flush=True,
        )
    parts = table["short"]["pass_ms"] + table["long"]["pass_ms"]
    table["ratio"] = table["together"]["pass_ms"] / parts
    print(f"together / sum of the parts: {table['ratio']:.2f}")
    table["group_of_strangers"] = {
        name: table["group"][name] / table["strangers"][name] for name in ("prefill_s", "pass_ms", "mb")
    }
    shares = ", ".join(f"{name} {share:.2f}" for name, share in table["group_of_strangers"].items())
    print(f"a group / strangers: {shares}")
    if options.json:
        options.json.write_text(json.dumps({"uneven": table}, indent=2))


if __name__ == "__main__":
    main()
