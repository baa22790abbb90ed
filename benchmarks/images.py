"""Measure what an image costs a turn beside the work of transformers' own processor.

    python benchmarks/images.py
    python benchmarks/images.py --quick --json images.json

A turn with one image of 640 x 480: the file is hashed, its size read, its tokens rendered between those of
the text, and its pixels are prepared as engine and trainer need them. The measure is the same
processor on the opened picture, in the same run. A group of 8 on one image then counts passes of the tower.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from agentenv.core import ImageTokens
from agentenv.engine import Sampling, TransformersEngine
from agentenv.engine.hf.vision import Vision
from agentenv.render import Renderer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.seeing import png, seer, tokenizer_of


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the least processor time of a call in milliseconds."""
    best = float("inf")
    for _ in range(repeats):
        began = time.thread_time()
        call()
        best = min(best, time.thread_time() - began)
    return best * 1000


def turn_cost(family: str, repeats: int) -> dict[str, Any]:
    """Return the cost of a turn with an image that nobody has seen before, and the processor's own."""
    tokenizer = tokenizer_of(family)
    renderer, vision = Renderer(tokenizer), Vision(tokenizer.images)
    numbers = iter(range(10**6))

    def fresh() -> bytes:  # a comment behind the end of a PNG makes another file of the same pixels
        return data + str(next(numbers)).encode()

    data = png(1, 640, 480)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    vision.pixels(ImageTokens(0, len(tokenizer.images.prepare(640, 480).ids), "0" * 64, data))
    processor = vision._processor
    shown = [[image]] if family == "smolvlm" else [image]

    def own() -> None:
        with Image.open(io.BytesIO(data)) as opened:
            opened.convert("RGB")
        processor(images=shown, return_tensors="pt")

    def turn() -> None:
        url = "data:image/png;base64," + base64.b64encode(fresh()).decode()
        part = {"type": "image_url", "image_url": {"url": url}}
        prompt = renderer.start(
            [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]
        )
        vision.pixels(prompt.images[0])

    peer, ours = milliseconds(own, repeats), milliseconds(turn, repeats)
    return {
        "family": family,
        "processor_ms": round(peer, 2),
        "turn_ms": round(ours, 2),
        "x": round(ours / peer, 2),
    }


async def tower_passes(family: str) -> int:
    """Return how often the tower runs for a group of 8 on one image."""
    tokenizer = tokenizer_of(family)
    engine = TransformersEngine(seer(family), tokenizer)
    url = "data:image/png;base64," + base64.b64encode(png(1, 96, 64)).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    prompt = Renderer(tokenizer).start([{"role": "user", "content": [part]}])
    await asyncio.gather(
        *[
            engine.generate(
                prompt, Sampling(max_tokens=4, seed=seed), stop_token_ids=(), images=prompt.images
            )
            for seed in range(8)
        ]
    )
    await engine.close()
    return engine.stats()["images"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    for family in ("qwen3_vl",) if options.quick else ("qwen2_5_vl", "qwen3_vl", "gemma3"):
        row = turn_cost(family, 3 if options.quick else 10)
        row["tower_passes_of_a_group"] = asyncio.run(tower_passes(family))
        table.append(row)
        print(" ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"images": table}, indent=2))


if __name__ == "__main__":
    main()
