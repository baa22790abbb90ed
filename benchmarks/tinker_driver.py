"""CPU of the driver of a training on a server of the Tinker API, beside what the SDK's own types take.

    python benchmarks/tinker_driver.py [--tokens 1000] [--sequences 64] [--steps 4]

The server is a stand-in that answers at once with numbers that mean nothing, so that all CPU is ours.
Episodes have one turn, and half of their tokens are sampled. What is printed is for each sequence and step:
playing (rendering, runner, engine), playing the same episodes with a scripted engine, which is what a rollout
costs with any engine, training (batch, loss, gradient, requests), and what it takes to make and read the same
data with the SDK's types alone. It needs the `train` and `tinker` extras.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types

import agentenv as ae
from agentenv.engine import Sampling, ScriptedEngine
from agentenv.envs import EnvSpec
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner
from agentenv.training import GRPOConfig, LoraOptions
from agentenv.training.step import GRPO
from agentenv_tinker import Service, TinkerEngine, TinkerLearner, Traits

GROUP = 8


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class _Stand:
    """The clients of the SDK in one object, which computes nothing."""

    def __init__(self, tokens: int) -> None:
        sampled, logprobs = [65 + place % 26 for place in range(tokens)], [-1.5] * tokens
        one = SimpleNamespace(tokens=sampled, logprobs=logprobs, stop_reason="length")
        self.answer = SimpleNamespace(
            sequences=[one], path="tinker://run/weights/x", metrics={}, supported_models=[]
        )

    def itself(self, *given: Any, **options: Any) -> _Stand:
        return self

    create_lora_training_client = create_sampling_client = create_rest_client = itself
    save_weights_and_get_sampling_client = itself

    def answered(self, *given: Any, **options: Any) -> Future[Any]:
        return done(self.answer)

    get_server_capabilities = sample = save_state = forward_backward = optim_step = answered
    delete_checkpoint_from_tinker_path = close = answered

    def forward(self, data: Any, loss_fn: str) -> Future[Any]:
        scores = [np.full(datum.model_input.length, -1.5, np.float32) for datum in data]
        outputs = [{"logprobs": types.TensorData.from_numpy(each)} for each in scores]
        return done(SimpleNamespace(loss_fn_outputs=outputs))


class _Silent(ae.ToolEnv):
    """Shows a long text, and pays by the member, so that groups differ."""

    def start(self, text: str) -> str:
        self.text = text
        return text

    def reward(self, answer: str) -> float:
        return float(id(self) // 64 % 2)


def sdk_alone(lengths: list[int]) -> float:
    """Return the CPU seconds of making and reading a step's data with the SDK's types alone."""
    began = time.process_time()
    for size in lengths:
        ids, numbers = list(range(size)), np.zeros(size, np.float32)
        for names in (("weights",), ("logprobs", "advantages")):  # the forward pass, then the gradient
            inputs = {"target_tokens": types.TensorData.from_numpy(np.arange(size))}
            inputs |= {name: types.TensorData.from_numpy(numbers) for name in names}
            types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=inputs)
        types.TensorData.from_numpy(numbers).to_numpy()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    half = options.tokens // 2
    stand = _Stand(half)
    tinker.ServiceClient = lambda **given: stand
    os.environ.setdefault("TINKER_API_KEY", "tml-none")
    service, tokenizer = Service("model"), byte_tokenizer()
    engine = TinkerEngine(service, tokenizer)
    config = GRPOConfig(lora=LoraOptions(r=32), engine="tinker:model")  # with recompute and correction
    learner = TinkerLearner(service, config, traits=Traits(), vocab_size=tokenizer.vocab_size)
    grpo = GRPO(learner, config)
    count = options.sequences // GROUP
    every = [{"text": f"{n} " + "x" * half} for n in range(2 * options.steps * count)]
    spec = EnvSpec.of("bench/Silent-v0", _Silent, tasks=every)
    tasks, renderer = list(spec.task_set()), Renderer(tokenizer)
    limits = ae.RunLimits(max_turns=1, max_tokens_per_turn=half)
    scripted = ScriptedEngine([stand.answer.sequences[0].tokens])

    def play(engine: Any, batch: int) -> list[Any]:
        async def played() -> list[Any]:
            runner = Runner(engine, renderer, limits, sampling=Sampling(), run_seed=batch)
            return [group async for group in runner.run_groups(spec, new, GROUP)]

        new = tasks[batch * count : (batch + 1) * count]
        return asyncio.run(played())

    rows: list[dict[str, float]] = []
    for step in range(options.steps):
        began = time.process_time()
        groups = play(engine, 2 * step)
        played = time.process_time()
        metrics, batch = grpo.step(groups)
        learner.bring(engine)
        trained = time.process_time()
        assert metrics["updates"] == 1
        play(scripted, 2 * step + 1)
        other = time.process_time() - trained
        alone = sdk_alone([len(row.token_ids) - 1 for row in batch.rows])
        spent = {"playing": played - began, "playing a script": other}
        spent |= {"training": trained - played, "sdk": alone}
        spent = {name: 1000 * value / options.sequences for name, value in spent.items()}
        rows.append(spent | {"driver": spent["playing"] + spent["training"] - spent["sdk"]})
    figures = {name: min(row[name] for row in rows[1:]) for name in rows[0]}  # the first step imports
    lengths = f"{options.sequences} sequences of about {options.tokens} tokens, half of them sampled"
    print(f"ms CPU a sequence and step, {lengths}:")
    print("  ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    if options.json:
        Path(options.json).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
