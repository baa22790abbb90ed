"""A tiny model really learns: 130 thousand parameters and one tool, through runner, renderer and engine.

Careless demonstrations (room right in two of three, state in four of five, one in five apologises, one
in ten calls no tool) are imitated first; then GRPO selects what earns the reward.
"""

from __future__ import annotations

import json
import math
import random
import re
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import agentenv as ae
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import ChatTokenizer, byte_tokenizer
from agentenv.tools import tool
from agentenv.training import GRPOConfig, GRPOTrainer, demonstrate

ROOMS = ("kitchen", "garage", "bedroom", "office", "hall", "cellar")
TASKS = [{"id": f"{state}-{room}", "room": room, "state": state} for room in ROOMS for state in ("on", "off")]
WORDS = (
    *ROOMS,
    *(
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
    ),
    *('{"name": "set_light", "arguments": {"room": "', '", "state": "', '"}}', "<tool_call>", "</tool_call>"),
)
TEMPLATE = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' + (m.content or '') -}}
{%- for c in m.tool_calls or [] -%}
{{- '<tool_call>{"name": ' + c.function.name | tojson + ', "arguments": ' + c.function.arguments | tojson -}}
{{- '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


class Lights(ToolEnv):
    """Six lamps and one switch."""

    def start(self, room: str, state: str) -> str:
        self.want = {room: state}
        self.lamps: dict[str, str] = {}
        return f"Turn {state} the {room} light."

    @tool
    def set_light(self, room: str, state: str) -> str:
        """Switch a light."""
        self.lamps[room] = state
        return "ok"

    def reward(self, answer: str) -> float:
        return float(self.lamps == self.want and answer.strip() == "Done.")


class LightsAgent(ae.AgentEnv):
    """The same lamps, switched by an agent with a loop of its own that speaks OpenAI's API."""

    async def agent(self, url: str, task: Any) -> str | None:
        self.lamps: dict[str, str] = {}
        messages: list[Any] = [{"role": "user", "content": f"Turn {task['state']} the {task['room']} light."}]
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as sdk:
            while True:
                said = await sdk.chat.completions.create(
                    model="any", messages=messages, tools=list(Lights().tool_schemas)
                )
                message = said.choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    return message.content
                for made in message.tool_calls:
                    arguments = json.loads(made.function.arguments)
                    self.lamps[arguments.get("room")] = arguments.get("state")
                    messages.append({"role": "tool", "tool_call_id": made.id, "content": "ok"})

    def reward(self, answer: str | None, task: Any) -> float:
        return float(self.lamps == {task["room"]: task["state"]} and (answer or "").strip() == "Done.")


def careless(messages, task, draw: random.Random):
    if messages[-1]["role"] == "user" and draw.random() >= 0.1:
        _, state, room = re.findall(r"(Turn (on|off) the (\w+) light)", messages[-1]["content"])[0]
        room = room if draw.random() < 0.6 else draw.choice(ROOMS)
        state = state if draw.random() < 0.8 else {"on": "off", "off": "on"}[state]
        function = {"name": "set_light", "arguments": json.dumps({"room": room, "state": state})}
        call = {"id": "call_0", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    return {"role": "assistant", "content": "Sorry." if draw.random() < 0.2 else "Done."}


LIMITS = ae.RunLimits(max_turns=3, max_tokens_per_turn=24)


def word_tokenizer() -> ChatTokenizer:
    """Bytes, and a token for each word of the task: the same everywhere, with nothing to train."""
    backend = Tokenizer.from_str(byte_tokenizer().backend.to_str())
    backend.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    return ChatTokenizer(
        backend, chat_template=TEMPLATE, special_tokens={"eos_token": "<|im_end|>"}, name="lights"
    )


def tiny_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=400,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            tie_word_embeddings=True,
            initializer_range=0.1,
            max_position_embeddings=256,
        )
    ).eval()


def lights() -> EnvSpec:
    return EnvSpec.of("test/Lights-v0", Lights, tasks={"train": TASKS, "test": TASKS})


def lights_agent() -> EnvSpec:
    return EnvSpec.of("test/LightsAgent-v0", LightsAgent, tasks={"train": TASKS, "test": TASKS})


def lights_trainer(output_dir, seed: int = 1, envs: EnvSpec | None = None, **options) -> GRPOTrainer:
    settings = {"groups_per_step": 8, "num_generations": 8, "max_steps": 25, "learning_rate": 1e-3, **options}
    return GRPOTrainer(
        GRPOConfig(seed=seed, output_dir=str(output_dir), **settings),
        model=tiny_llama(seed),
        tokenizer=word_tokenizer(),
        envs=envs or lights(),
        limits=LIMITS,
        runner=ae.RunnerOptions(concurrency=64),
    )


def warm_up(trainer: GRPOTrainer, seed: int = 1) -> list[dict[str, float]]:
    tasks = [TASKS[number % len(TASKS)] for number in range(400)]
    shown = demonstrate(lights(), tasks, careless, trainer.renderer, limits=LIMITS, seed=seed)
    assert 0.2 < sum(one.reward for one in shown) / len(shown) < 0.55
    return trainer.warmup(
        shown, steps=200, batch_size=32, learning_rate=3e-3, warmup_steps=20, lr_scheduler_type="linear"
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def warm(one_thread, tmp_path_factory) -> SimpleNamespace:
    trainer = lights_trainer(tmp_path_factory.mktemp("warm"))
    before = trainer.evaluate()
    shown = warm_up(trainer)
    return SimpleNamespace(before=before, shown=shown, weights=trainer.model.state_dict())


@pytest.fixture(scope="module")
def synchronous(warm, tmp_path_factory) -> SimpleNamespace:
    return learn(warm, tmp_path_factory.mktemp("synchronous"))


def learn(warm: SimpleNamespace, output_dir, **options) -> SimpleNamespace:
    trainer = lights_trainer(output_dir, **options)
    trainer.model.load_state_dict(warm.weights)
    history = trainer.train()
    rewards = [metrics["reward"] for metrics in history]
    return SimpleNamespace(
        history=history,
        output_dir=output_dir,
        first=sum(rewards[:3]) / 3,
        last=sum(rewards[-5:]) / 5,
        best=max(sum(rewards[start : start + 5]) / 5 for start in range(len(rewards) - 4)),
        success=history[-1]["eval/success"],
    )


@pytest.mark.slow
def test_a_tiny_model_learns_a_tool_task(warm, synchronous):
    history = synchronous.history
    assert warm.before["eval/success"] == 0.0
    assert warm.shown[-1]["sft/nll"] < 0.5
    assert synchronous.last - synchronous.first >= 0.25
    assert synchronous.success >= 11 / 12
    # The sampler's logprobs are those of the trainer on the same weights.
    assert max(metrics.get("mismatch/abs_max", 0.0) for metrics in history) < 1e-4
    assert all(math.isfinite(value) for metrics in history for value in metrics.values())
    lines = (synchronous.output_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(26))  # scored first


@pytest.mark.exhaustive
def test_an_agent_with_a_loop_of_its_own_learns_too(warm, tmp_path):
    agent = learn(warm, tmp_path, envs=lights_agent())

    assert agent.last - agent.first >= 0.25
    assert agent.success >= 11 / 12
    # The prompts are those of the environment, so the weights that were warmed up there fit.
    assert max(metrics.get("mismatch/abs_max", 0.0) for metrics in agent.history) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("old_logprobs", [pytest.param("sampler", marks=pytest.mark.exhaustive), "recompute"])
def test_one_step_ahead_it_learns_as_well(warm, synchronous, tmp_path, old_logprobs):
    correction = "token_truncate" if old_logprobs == "recompute" else None

    ahead = learn(warm, tmp_path, max_ahead=1, old_logprobs=old_logprobs, importance_correction=correction)

    assert {metrics["staleness/max"] for metrics in ahead.history} == {0.0, 1.0}
    # Which groups are a step old depends on the moment, and at this rate a step may overshoot and be mended.
    assert ahead.best - ahead.first >= 0.25
    assert ahead.success >= 11 / 12
    assert ahead.best >= synchronous.last - 0.1
