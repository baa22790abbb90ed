"""Measure how fast a device computes a layer of a model and reads its memory, in a few seconds.

A process of its own measures, so that nothing of the device's memory stays taken afterwards:

    python -m agentenv.placement.measure MODEL TOKENS DEVICE
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from agentenv.placement.machine import Machine, Speeds
from agentenv.placement.shape import model_shape, read_config, shortened

__all__ = ["measured", "speeds_of"]

logger = logging.getLogger(__name__)

MOST_TOKENS = 8192
"""Most tokens of the pass that is measured."""
COPIED_BYTES = 1 << 28
REPEATS = 4
MOST_S = 300.0
"""Longest time, in seconds, that the measuring process may take."""


def measured(machine: Machine, model: str, context: int, device: str) -> Machine:
    """Return the machine with the speeds of its first device; unchanged, with a warning, if that fails.

    Args:
        machine: the machine that this process runs on.
        model: directory or Hub id of the model, of which only the config is read.
        context: tokens of the longest episode.
        device: kind of the devices, as torch names it.
    """
    command = [sys.executable, "-P", "-m", __spec__.name, model, str(min(context, MOST_TOKENS)), device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S, check=True)  # noqa: S603
        found = Speeds(**json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.SubprocessError, OSError, ValueError, IndexError, TypeError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        logger.warning(
            "the speed of the devices was not measured, so that of their kind is taken: %s", *said or [""]
        )
        return machine
    return replace(machine, measured=found)


def speeds_of(config: Any, tokens: int, device: str) -> Speeds:
    """Return what a device reaches on one layer of a model and on its memory.

    Args:
        config: transformers config of the model.
        tokens: length of the sequence that the layer computes, forward and backward.
        device: the device, whose memory is copied from one place to another.
    """
    from transformers import AutoModelForCausalLM

    shape = model_shape(config)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(shortened(config, 1), dtype=torch.bfloat16).eval()
        hidden = torch.randn(1, tokens, config.get_text_config().hidden_size, dtype=torch.bfloat16)
        source = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    decoder = model.get_decoder()

    def step() -> None:
        decoder(inputs_embeds=hidden, use_cache=False).last_hidden_state.sum().backward()

    forward = 2 * (shape.active - shape.root) / shape.layers + 2 * shape.attention_width * tokens
    return Speeds(
        products_per_s=3 * tokens * forward / _least_seconds(step, device),
        bytes_per_s=2 * COPIED_BYTES / _least_seconds(lambda: target.copy_(source), device),
    )


def _least_seconds(run: Callable[[], object], device: str) -> float:
    """Return the shortest time of some runs after a first one, which loads kernels."""
    taken: list[float] = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def main() -> None:
    """Measure, and print the speeds as a line of JSON."""
    model, tokens, device = sys.argv[1:]
    sys.stdout.write(json.dumps(asdict(speeds_of(read_config(model), int(tokens), device))) + "\n")


if __name__ == "__main__":
    main()
