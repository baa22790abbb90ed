"""Whether a model learns on this device alone: from random weights, in bfloat16 and float32.

No model file is needed. Two layers imitate demonstrations that are often wrong, and then learn by GRPO to
switch the lamp that they are asked to. With these sizes the mean reward rose from 0.49 to 0.93 within 20
steps on a CPU, in both number formats.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import tempfile
import time
from typing import Any

import torch
from cells import Bench
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import agentenv as ae
from agentenv.envs import EnvSpec
from agentenv.render import ChatTokenizer, byte_tokenizer
from agentenv.training import GRPOConfig, GRPOTrainer, demonstrate

ROOMS = ("kitchen", "garage", "bedroom", "office", "hall", "cellar")
WORDS = [
    *ROOMS,
    "on",
    "off",
    "user\n",
    "assistant\n",
    "tool\n",
    "Turn ",
    " the ",
    " light.",
    "ok",
    "Done.",
    "Sorry.",
    "\n",
    '{"name": "set_light", "arguments": {"room": "',
    '", "state": "',
    '"}}',
    "<tool_call>",
    "</tool_call>",
]
"""Each is one token, so that a turn has few."""
TEMPLATE = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') -}}"
    "{%- for c in m.tool_calls or [] -%}{{- '<tool_call>{\"name\": ' + c.function.name | tojson + "
    "', \"arguments\": ' + c.function.arguments | tojson -}}{{- '}</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


class Lamps(ae.ToolEnv):
    """Six lamps and one switch."""

    def start(self, room: str, state: str) -> str:
        """Ask for one lamp."""
        self.want, self.lamps = {room: state}, {}
        return f"Turn {state} the {room} light."

    @ae.tool
    def set_light(self, room: str, state: str) -> str:
        """Switch a light."""
        self.lamps[room] = state
        return "ok"

    def reward(self, answer: str) -> float:
        """Reward exactly that lamp, and the word that ends."""
        return float(self.lamps == self.want and answer.strip() == "Done.")


def careless(messages: Any, task: Any, draw: random.Random) -> dict[str, Any]:
    """Switch the wrong lamp, or none, as often as the right one."""
    if messages[-1]["role"] == "user" and draw.random() >= 0.1:
        ((state, room),) = re.findall(r"Turn (on|off) the (\w+) light", messages[-1]["content"])
        room = room if draw.random() < 0.6 else draw.choice(ROOMS)
        state = state if draw.random() < 0.8 else {"on": "off", "off": "on"}[state]
        asked = {"name": "set_light", "arguments": json.dumps({"room": room, "state": state})}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_0", "type": "function", "function": asked}],
        }
    return {"role": "assistant", "content": "Sorry." if draw.random() < 0.2 else "Done."}


def trainer_of(bench: Bench, dtype: str, spec: Any, limits: ae.RunLimits) -> GRPOTrainer:
    """Return a trainer of two layers with random weights, and a tokenizer of bytes and words."""
    backend = Tokenizer.from_str(byte_tokenizer().backend.to_str())
    backend.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    special = {"eos_token": "<|im_end|>"}
    tokenizer = ChatTokenizer(backend, chat_template=TEMPLATE, special_tokens=special, name="lamps")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
        initializer_range=0.1,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).to(bench.device, getattr(torch, dtype)).eval()
    options = GRPOConfig(
        seed=1,
        output_dir=tempfile.mkdtemp(),
        groups_per_step=8,
        num_generations=8,
        max_steps=1 if bench.small else 20,
        learning_rate=1e-3,
        dtype=dtype,
        device=bench.device,
    )
    runner = ae.RunnerOptions(concurrency=64)
    return GRPOTrainer(options, model=model, tokenizer=tokenizer, envs=spec, limits=limits, runner=runner)


def learned(bench: Bench, dtype: str) -> None:
    tasks = [
        {"id": f"{state}-{room}", "room": room, "state": state} for room in ROOMS for state in ("on", "off")
    ]
    spec = EnvSpec.of("bench/Lamps-v0", Lamps, tasks={"train": tasks, "test": tasks})
    limits = ae.RunLimits(max_turns=3, max_tokens_per_turn=24)
    trainer = trainer_of(bench, dtype, spec, limits)
    shown, steps = (24, 4) if bench.small else (400, 200)
    began = time.perf_counter()
    asked = [tasks[number % len(tasks)] for number in range(shown)]
    examples = demonstrate(spec, asked, careless, trainer.renderer, limits=limits, seed=1)
    rates = {"learning_rate": 3e-3, "warmup_steps": 20, "lr_scheduler_type": "linear"}
    warm = trainer.warmup(examples, steps=steps, batch_size=32, **rates)
    bench.tell(f"imitated in {dtype}", nll=float(warm[-1]["sft/nll"]), seconds=time.perf_counter() - began)
    began = time.perf_counter()
    history = trainer.train()
    rewards = [one["reward"] for one in history]
    bench.tell(
        f"learned in {dtype}",
        first=statistics.mean(rewards[:3]),
        last=statistics.mean(rewards[-5:]),
        success=history[-1].get("eval/success"),
        steps=len(rewards),
        seconds=time.perf_counter() - began,
        way=trainer.learner.policy.way,
    )
    names = sorted({name for one in history for name in one})
    worst = {
        name: max(one.get(name, 0.0) for one in history) for name in names if name.startswith("mismatch/")
    }
    bench.tell(f"worst mismatch in {dtype}", **worst)
    times = {
        name: statistics.median(one[name] for one in history if name in one)
        for name in names
        if name.startswith("time/")
    }
    bench.tell(f"times in {dtype}", **times)


def main() -> None:
    bench = Bench(__doc__)
    for dtype in ("bfloat16", "float32"):
        with bench.cell(f"learned in {dtype}"):
            learned(bench, dtype)
    bench.end()


if __name__ == "__main__":
    main()
