"""Bring full weights to a running vLLM server, through a directory that both read or over a connection.

    agentenv serve MODEL --transfer &
    python benchmarks/weights.py http://127.0.0.1:8000/v1

The ways take turns. The seconds are those of `push_weights`: write the weights, pause, load, label, resume.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from agentenv.engine import load_engine, push_weights

WAYS = ("disk", "gloo")


async def main(url: str, rounds: int) -> dict[str, Any]:
    """Push the server's own weights by both ways in turns; return the seconds of each push."""
    first: Any = (await asyncio.to_thread(load_engine, url)).engine
    model: Any = AutoModelForCausalLM.from_pretrained(first.report.model_path, dtype="auto")
    await first.close()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as shared:
        for number in range(2 * rounds):
            way = WAYS[number % 2]
            # One engine at a time, because each keeps its server at the weights that it has pushed.
            engine: Any = (await asyncio.to_thread(load_engine, url, transfer=way)).engine
            began = time.perf_counter()
            await push_weights(engine, model, version=engine.weights_version + 1, directory=Path(shared))
            seconds[way].append(time.perf_counter() - began)
            await engine.close()
    size = sum(parameter.nbytes for parameter in model.parameters())
    return {"MB": round(size / 1e6), **{way: statistics.median(times) for way, times in seconds.items()}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(main(options.url, options.rounds))))
