"""Measure a vLLM server of agentenv's own (`vllm:PATH`) against vLLM alone, on the same prompts.

    python benchmarks/own_server.py --model MODEL [--quick] [--json own_server.json]

Every episode has several turns, as in engines.py. vLLM alone gets all prompts of a turn in one list, and
returns ids and log-probabilities too. Each runs in a process of its own, because one process has room for one
vLLM.
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

from engines import observation, play, prompts

from agentenv.engine import load_engine
from agentenv.engine.hf import locate

HOWS = ("ours", "alone")
CONTEXT = 2048
VOCABULARY = 40_000


def measure_ours(model: str, options: argparse.Namespace) -> list[float]:
    """Return the seconds of each turn through agentenv's engine."""

    async def run() -> list[float]:
        engine: Any = load_engine(f"vllm:{model}", max_model_len=CONTEXT, memory_share=options.share).engine
        try:
            await play(engine, prompts(2, VOCABULARY), 1, 4, "warm")
            return await play(
                engine, prompts(options.episodes, VOCABULARY), options.turns, options.tokens, "run"
            )
        finally:
            await engine.close()

    return asyncio.run(run())


def measure_alone(model: str, options: argparse.Namespace) -> list[float]:
    """Return the seconds of each turn through vLLM's own class."""
    from vllm import LLM, SamplingParams

    files = locate(model)
    path = str(Path(files.path) / files.gguf_file) if files.gguf_file else files.path
    settings = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
    engine = LLM(path, max_model_len=CONTEXT, gpu_memory_utilization=options.share, **settings)

    def turn(contexts: list[list[int]], number: int, tokens: int) -> list[list[int]]:
        asked = [
            SamplingParams(max_tokens=tokens, seed=100 * episode + number, logprobs=0, ignore_eos=True)
            for episode in range(len(contexts))
        ]
        done = engine.generate([{"prompt_token_ids": one} for one in contexts], asked, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done]

    turn(prompts(2, VOCABULARY), 0, 4)
    seconds, contexts = [], prompts(options.episodes, VOCABULARY)
    for number in range(options.turns):
        began = time.perf_counter()
        sampled = turn(contexts, number, options.tokens)
        seconds.append(time.perf_counter() - began)
        for context, tokens in zip(contexts, sampled, strict=True):
            assert len(tokens) == options.tokens
            context += [*tokens, *observation(number)]
    return seconds


def run_child(how: str, given: list[str]) -> list[float] | None:
    """Measure in a fresh process; return None if it failed, and say why."""
    done = subprocess.run(
        [sys.executable, __file__, *given, "--child", how], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        print(f"{how} has no figures: the exit code is {done.returncode}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="4 episodes, 2 turns, 8 tokens")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--model", default="smollm2", help="a directory, or smollm2")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--share", type=float, default=0.4, help="share of the memory for vLLM")
    parser.add_argument("--child", choices=HOWS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.episodes, options.turns, options.tokens = 4, 2, 8
    if options.child:
        measure = measure_ours if options.child == "ours" else measure_alone
        print(json.dumps(measure(options.model, options)))
        return 0
    total = options.episodes * options.turns * options.tokens
    rows = []
    for how in HOWS:
        turn_s = run_child(how, sys.argv[1:])
        if turn_s is not None:
            rows.append({"engine": how, "tokens_per_s": total / sum(turn_s), "turn_s": turn_s})
            print(f"{how:8}{total / sum(turn_s):12.1f} tokens a second", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return int(len(rows) < len(HOWS))


if __name__ == "__main__":
    sys.exit(main())
