"""Bring full weights to a running vLLM server, through a directory that both read or over a connection.

    agentenv serve MODEL --transfer &
    python benchmarks/weights.py http://127.0.0.1:8000/v1
    python benchmarks/weights.py --serve MODEL --ways disk gloo nccl --json weights.json

The ways take turns. The seconds are those of `push_weights`: write the weights, pause, load, label, resume.
With --serve the script starts the server, on the second GPU if there is one. NCCL connects no two processes
on one GPU, so that way needs two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from agentenv.core import AgentEnvError
from agentenv.engine import load_engine, push_weights
from agentenv.engine.vllm import ServeOptions, running_server

WAYS = ("disk", "gloo")


async def push(url: str, way: str, model: Any, shared: str) -> float:
    """Push the weights once; return the seconds."""
    # One engine at a time, because each keeps its server at the weights that it has pushed.
    engine: Any = (await asyncio.to_thread(load_engine, url, transfer=way)).engine
    try:
        began = time.perf_counter()
        await push_weights(engine, model, version=engine.weights_version + 1, directory=Path(shared))
        return time.perf_counter() - began
    finally:
        await engine.close()


async def main(url: str, rounds: int, ways: tuple[str, ...] = WAYS) -> dict[str, Any]:
    """Push the server's own weights by each way in turns; return the seconds, or why a way has none."""
    first: Any = (await asyncio.to_thread(load_engine, url)).engine
    model: Any = AutoModelForCausalLM.from_pretrained(first.report.model_path, dtype="auto")
    if torch.cuda.is_available():
        model = model.cuda()
    await first.close()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    failed: dict[str, str] = {}
    if "nccl" in ways and torch.cuda.device_count() == 1:
        failed["nccl"] = "not tried: NCCL connects no two processes on one GPU, and there is one here"
    with tempfile.TemporaryDirectory() as shared:
        for _ in range(rounds):
            for way in ways:
                if way in failed:
                    continue
                try:
                    seconds[way].append(await push(url, way, model, shared))
                except AgentEnvError as error:
                    failed[way] = f"no figure: {error}"
    size = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "MB": round(size / 1e6),
        **{way: statistics.median(times) for way, times in seconds.items() if times},
        **failed,
    }


@contextmanager
def served(model: str, share: float) -> Iterator[str]:
    """Start a server, on the second GPU if there is one, and yield its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    second = (1,) if torch.cuda.device_count() > 1 else ()
    options = ServeOptions(port=port, transfer=True, memory_share=share, max_model_len=2048, devices=second)
    with running_server(model, options, log=Path(tempfile.mkdtemp()) / "vllm.log") as url:
        yield url


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", nargs="?", default="")
    parser.add_argument("--serve", metavar="MODEL", help="start a server for this model")
    parser.add_argument("--share", type=float, default=0.4, help="share of the memory for the server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=["disk", "gloo", "nccl"])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if bool(options.url) == bool(options.serve):
        parser.error("name a server, or a model with --serve")
    if options.url:
        found = asyncio.run(main(options.url, options.rounds, tuple(options.ways)))
    else:
        with served(options.serve, options.share) as address:
            found = asyncio.run(main(address, options.rounds, tuple(options.ways)))
    print(json.dumps(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(int(not any(isinstance(found.get(way), float) for way in options.ways)))
