"""Other trainers play our environments with their own samplers, and get the tokens as these returned them."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import agentenv as ae
from agentenv.envs import EnvSpec
from agentenv.interop.skyrl import SkyRLGenerator
from agentenv.interop.slime import generate_function
from agentenv.interop.tinker_cookbook import group_builder
from agentenv.interop.verl import agent_loop
from agentenv.render import byte_tokenizer
from helpers.verl_class import verls_own_class

TOKENIZER = byte_tokenizer()
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 1}}\n</tool_call><|im_end|>'
LIMITS = ae.RunLimits(max_turns=3)


class Adder(ae.ToolEnv):
    def start(self, x: int, y: int) -> str:
        self.want = x + y
        return f"What is {x} + {y}?"

    @ae.tool
    def add(self, a: int, b: int) -> int:
        "Add two numbers."
        return a + b

    def reward(self, answer: str) -> float:
        if self.want == 99:
            raise RuntimeError("broken scorer")
        return float(str(self.want) in answer)


SPEC = EnvSpec.of("demo/LiveAdder-v0", Adder, tasks=[{"x": 2, "y": 1}])
GOOD, BAD = {"x": 2, "y": 1}, {"x": 98, "y": 1}


@dataclass
class Policy:
    """A host's sampler: a call, then the answer."""

    seen: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)
    sessions: list[Any] = field(default_factory=list)

    def __call__(self, prompt: list[int], session: Any = None) -> tuple[list[int], list[float]]:
        text = TOKENIZER.decode(prompt)
        ids = TOKENIZER.encode("It is 3.<|im_end|>" if text.count("assistant") > 1 else CALL)
        logprobs = [-0.25 * (place % 4 + 1) for place in range(len(ids))]
        self.seen.append((list(prompt), ids, logprobs))
        self.sessions.append(session)
        return ids, logprobs

    def check(self, whole: list[int], mask: list[int], logprobs: list[float]) -> None:
        """Compare what reached the host's trainer with what its sampler was asked and returned."""
        last_prompt, last_ids, _ = self.seen[-1]
        assert whole == last_prompt + last_ids
        sampled = [value for _, _, values in self.seen for value in values]
        assert [value for value, trained in zip(logprobs, mask, strict=True) if trained] == sampled
        response = whole[-len(mask) :]
        tokens = [token for _, ids, _ in self.seen for token in ids]
        assert [token for token, trained in zip(response, mask, strict=True) if trained] == tokens


@dataclass
class Output:
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    reward_score: float
    num_turns: int
    metrics: dict
    extra_fields: dict


def verl(policy: Policy, output: Any = Output):
    class Base:
        def __init__(self) -> None:
            self.tokenizer, self.server_manager = TOKENIZER, self
            self.rollout_config = SimpleNamespace(prompt_length=2048, response_length=2048)

        async def generate(self, request_id, *, prompt_ids, sampling_params):
            assert sampling_params["logprobs"] is True
            ids, logprobs = policy(prompt_ids, request_id)
            return SimpleNamespace(token_ids=ids, log_probs=logprobs, stop_reason="completed")

    return agent_loop(Base, output, env=SPEC, limits=LIMITS)()


@pytest.mark.parametrize("own", [False, True])
async def test_verl_gets_a_row(own):
    kind = verls_own_class() if own else Output
    if kind is None:
        pytest.skip("verl is not installed; make .venv/.peers installs it")
    policy = Policy()
    loop = verl(policy, kind)
    out = await loop.run({"temperature": 1.0}, task=GOOD, index=0)
    assert out.reward_score == 1.0
    policy.check(out.prompt_ids + out.response_ids, out.response_mask, out.response_logprobs)
    assert len(set(policy.sessions)) == 1
    assert {"turn_scores", "tool_rewards"} <= set(out.extra_fields)
    failed = await loop.run({"temperature": 1.0}, task=BAD, index=1)
    assert (failed.response_mask, failed.reward_score) == ([0], 0.0)
    assert failed.extra_fields["error"] == "broken scorer"


async def test_verl_would_cut_a_long_row_and_gets_one_that_trains_nothing():
    loop = verl(Policy())
    loop.rollout_config.response_length = 1000
    loop.rollout_config.prompt_length = 5
    out = await loop.run({}, task=GOOD)
    assert out.response_mask == [0]
    assert "max_prompt_length" in out.extra_fields["left_out"]


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclass
class Sample:
    """The fields of slime's `Sample` that a generate function sets (slime/utils/types.py)."""

    Status = Status
    index: int | None = None
    prompt: str = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: float | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    rollout_id: int | None = None
    metadata: dict = field(default_factory=dict)


async def test_slime_gets_samples():
    policy = Policy()

    async def post(url, body):
        assert url == "http://host:1/generate"
        assert body["sampling_params"]["no_stop_trim"]
        assert not body["sampling_params"]["skip_special_tokens"]
        ids, logprobs = policy(body["input_ids"])
        pairs = [[value, token, None] for value, token in zip(logprobs, ids, strict=True)]
        return {"meta_info": {"output_token_logprobs": pairs, "finish_reason": {"type": "stop"}}}

    generate = generate_function(post, env=SPEC, tokenizer=TOKENIZER, limits=LIMITS)
    args = SimpleNamespace(sglang_router_ip="host", sglang_router_port=1)
    params = {"temperature": 1.0, "max_new_tokens": 512}
    asked = Sample(index=3, metadata={"task": GOOD})
    out = await generate(args, asked, params)
    assert (out.reward, out.status, out.index) == (1.0, Status.COMPLETED, 3)
    assert out.response_length == len(out.loss_mask) == len(out.rollout_log_probs)
    policy.check(out.tokens, out.loss_mask, out.rollout_log_probs)
    assert asked.tokens == []
    failed = await generate(args, Sample(index=4, metadata={"task": BAD}), params)
    assert (failed.reward, failed.status, failed.loss_mask) == (0.0, Status.ABORTED, [0])


async def test_skyrl_gets_a_batch_in_its_order():
    policy = Policy()

    class Client:
        async def generate(self, batch):
            ids, logprobs = policy(batch["prompt_token_ids"][0], batch["session_ids"][0])
            return {"response_ids": [ids], "response_logprobs": [logprobs], "stop_reasons": ["stop"]}

    generator = SkyRLGenerator(Client(), env=SPEC, tokenizer=TOKENIZER, limits=LIMITS)
    ids = [
        SimpleNamespace(instance_id="a", repetition_id=0),
        SimpleNamespace(instance_id="b", repetition_id=0),
    ]
    one = {"env_extras": [{"task": GOOD}], "sampling_params": {"max_tokens": 512}, "trajectory_ids": ids[:1]}
    out = await generator.generate(one)
    assert sum(out["rewards"][0]) == 1.0
    policy.check(
        out["prompt_token_ids"][0] + out["response_ids"][0], out["loss_masks"][0], out["rollout_logprobs"][0]
    )
    both = await generator.generate(
        {**one, "env_extras": [{"task": BAD}, {"task": GOOD}], "trajectory_ids": ids}
    )
    assert [sum(mask) > 0 for mask in both["loss_masks"]] == [False, True]
    assert both["stop_reasons"][0] == "error"
    assert both["rollout_metrics"]["agentenv/error"] == 1.0
    lengths = [[len(row) for row in both[name]] for name in ("response_ids", "rewards", "loss_masks")]
    assert lengths[0] == lengths[1] == lengths[2]


@pytest.fixture
def cookbook(monkeypatch):
    """The classes of tinker-cookbook's `rl/types.py` that an environment is made of."""
    pytest.importorskip("tinker")
    types = ModuleType("tinker_cookbook.rl.types")

    @dataclass
    class StepResult:
        reward: float
        episode_done: bool
        next_observation: Any
        next_stop_condition: Any
        metrics: dict = field(default_factory=dict)

    types.Env, types.EnvGroupBuilder, types.StepResult = type("Env", (), {}), type("G", (), {}), StepResult
    for name in ("tinker_cookbook", "tinker_cookbook.rl"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["tinker_cookbook.rl"].types = types
    monkeypatch.setitem(sys.modules, "tinker_cookbook.rl.types", types)
    from agentenv.interop import tinker_cookbook

    tinker_cookbook._group_type.cache_clear()
    yield types
    tinker_cookbook._group_type.cache_clear()


async def test_the_cookbook_steps_through_an_episode(cookbook, tmp_path, monkeypatch):
    from agentenv.training.loop import save_tokenizer

    save_tokenizer(TOKENIZER, tmp_path)
    if SPEC.id not in ae.registry:
        ae.register(SPEC.id, Adder, tasks=[GOOD])
    policy = Policy()
    builder = group_builder(env=SPEC.id, task=GOOD, tokenizer=str(tmp_path), group_size=2, limits=LIMITS)
    builder = pickle.loads(pickle.dumps(builder))
    for env in await builder.make_envs():
        observation, stop = await env.initial_observation()
        done = False
        while not done:
            ids, _ = policy(observation.to_ints())
            assert ids[-1] in stop
            result = await env.step(ids)
            observation, stop, done = result.next_observation, result.next_stop_condition, result.episode_done
        assert result.reward == 1.0
        assert result.metrics["stop/final_answer"] == 1.0
    # Prompts only append: the second prompt begins with the first and its answer.
    (first, answer, _), (second, _, _) = policy.seen[:2]
    assert second[: len(first) + len(answer)] == first + answer
    (bad,) = await group_builder(env=SPEC.id, task=BAD, tokenizer=str(tmp_path), group_size=1).make_envs()
    observation, _ = await bad.initial_observation()
    observation = (await bad.step(policy(observation.to_ints())[0])).next_observation
    with pytest.raises(ae.AgentEnvError, match="broken scorer"):
        await bad.step(policy(observation.to_ints())[0])
