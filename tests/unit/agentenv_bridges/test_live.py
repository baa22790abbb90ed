"""Other trainers play our environments with their own samplers, and get the tokens as these returned them."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import agentenv as ae
from agentenv.envs import EnvSpec
from agentenv.render import byte_tokenizer
from agentenv_bridges.trainers.skyrl import SkyRLGenerator
from agentenv_bridges.trainers.slime import generate_function
from agentenv_bridges.trainers.tinker_cookbook import group_builder
from agentenv_bridges.trainers.verl import agent_loop
from helpers.host_classes import slimes_sample, verls_output
from helpers.training import saved_tiny

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


@pytest.fixture
def registered() -> None:
    """Registers the environment, for hosts that get its name."""
    if SPEC.id not in ae.registry:
        ae.register(SPEC.id, Adder, tasks=[GOOD])


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
    kind = verls_output() if own else Output
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


VERLS_LOOP = """
import agentenv as ae
from agentenv_bridges import agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

class MyLoop(agent_loop(AgentLoopBase, AgentLoopOutput, env="demo/LiveAdder-v0", limits=ae.RunLimits(max_turns=3))):
    pass
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
async def test_verls_own_worker_finds_the_loop_and_takes_its_rows(registered, tmp_path, monkeypatch):
    # Importing it takes half a minute and no GPU; `make test-peers` has it. Only the client of servers is ours.
    verls = pytest.importorskip("verl.experimental.agent_loop.agent_loop", exc_type=ImportError)
    from hydra import compose, initialize_config_module
    from verl.protocol import DataProto

    (tmp_path / "verls_loop.py").write_text(VERLS_LOOP)
    (tmp_path / "loops.yaml").write_text("- name: agentenv\n  _target_: verls_loop.MyLoop\n")
    monkeypatch.syspath_prepend(tmp_path)
    rollout = "actor_rollout_ref.rollout"
    given = {
        "actor_rollout_ref.model.path": saved_tiny(tmp_path / "model"),
        f"{rollout}.name": "vllm",
        f"{rollout}.agent.agent_loop_config_path": tmp_path / "loops.yaml",
        f"{rollout}.calculate_log_probs": True,
        "data.max_prompt_length": 1024,
        "data.max_response_length": 512,
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"{name}={value}" for name, value in given.items()])
    policy = Policy()

    class Client:
        async def generate(self, request_id, *, prompt_ids, sampling_params):
            ids, logprobs = policy(prompt_ids, request_id)
            return SimpleNamespace(token_ids=ids, log_probs=logprobs, stop_reason="completed")

    def rows(tasks):
        given = {"raw_prompt": [[]] * len(tasks), "agent_name": ["agentenv"] * len(tasks), "task": tasks}
        columns = {name: np.empty(len(tasks), dtype=object) for name in given}
        for name, values in given.items():
            columns[name][:] = values
        return DataProto(batch=None, non_tensor_batch=columns, meta_info={})

    worker = verls.AgentLoopWorker(config, Client())
    out = await worker.generate_sequences(rows([GOOD]))
    (ids,), (mask,) = out.batch["input_ids"].tolist(), out.batch["response_mask"].tolist()
    taken = out.batch["attention_mask"][0].bool().tolist()
    length = sum(taken[1024:])
    whole = [token for token, kept in zip(ids, taken, strict=True) if kept]
    policy.check(whole, mask[:length], out.batch["rollout_log_probs"][0, :length].tolist())
    assert out.batch["rm_scores"].sum() == out.batch["rm_scores"][0, length - 1] == 1.0
    both = await worker.generate_sequences(rows([BAD, GOOD]))
    assert both.batch["response_mask"].sum(1).tolist() == [0, sum(mask)]
    assert both.batch["rm_scores"].sum(1).tolist() == [0.0, 1.0]


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
    session_id: str | None = None
    metadata: dict = field(default_factory=dict)


@pytest.mark.parametrize("kind", [kind for kind in (Sample, slimes_sample()) if kind is not None])
async def test_slime_gets_samples(kind):
    policy, status = Policy(), kind.Status

    async def post(url, body, headers):
        assert url == "http://host:1/generate"
        assert body["sampling_params"]["no_stop_trim"]
        assert not body["sampling_params"]["skip_special_tokens"]
        ids, logprobs = policy(body["input_ids"], headers["X-SMG-Routing-Key"])
        pairs = [[value, token, None] for value, token in zip(logprobs, ids, strict=True)]
        return {"meta_info": {"output_token_logprobs": pairs, "finish_reason": {"type": "stop"}}}

    generate = generate_function(post, env=SPEC, tokenizer=TOKENIZER, limits=LIMITS)
    args = SimpleNamespace(sglang_router_ip="host", sglang_router_port=1)
    params = {"temperature": 1.0, "max_new_tokens": 512}
    asked = kind(index=3, metadata={"task": GOOD}, session_id="mine")
    out = await generate(args, asked, params)
    assert (out.reward, out.status, out.index) == (1.0, status.COMPLETED, 3)
    assert policy.sessions == ["mine", "mine"]
    assert out.response_length == len(out.loss_mask) == len(out.rollout_log_probs)
    policy.check(out.tokens, out.loss_mask, out.rollout_log_probs)
    assert asked.tokens == []
    failed = await generate(args, kind(index=4, metadata={"task": BAD}), params)
    assert (failed.reward, failed.status, failed.loss_mask) == (0.0, status.ABORTED, [0])
    assert failed.response_length == len(failed.rollout_log_probs) == 1
    # Without a session of slime's, the turns of an episode have one of ours.
    first, second = policy.sessions[2:]
    assert first == second != "mine"


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


@pytest.mark.slow
async def test_skyrls_own_check_takes_what_the_generator_returns():
    # Importing it takes half a minute; `make test-skyrl` has it.
    trainer_utils = pytest.importorskip("skyrl.train.utils.trainer_utils", exc_type=ImportError)
    base = pytest.importorskip("skyrl.train.generators.base")
    policy = Policy()

    class Client:
        async def generate(self, batch):
            ids, logprobs = policy(batch["prompt_token_ids"][0])
            return {"response_ids": [ids], "response_logprobs": [logprobs], "stop_reasons": ["stop"]}

    generator = SkyRLGenerator(Client(), env=SPEC, tokenizer=TOKENIZER, limits=LIMITS)
    batch = base.GeneratorInput(
        prompts=[[], []],
        env_classes=["", ""],
        env_extras=[{"task": GOOD}, {"task": BAD}],
        sampling_params={"max_tokens": 512},
        trajectory_ids=[base.TrajectoryID(name, 0) for name in "ab"],
        batch_metadata=base.BatchMetadata(0, "train"),
    )
    out = await generator.generate(batch)
    trainer_utils.validate_generator_output(2, out)
    assert out.keys() <= base.GeneratorOutput.__annotations__.keys()
    assert out["trajectory_ids"] == batch["trajectory_ids"]
    assert [sum(rewards) for rewards in out["rewards"]] == [1.0, 0.0]


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
    from agentenv_bridges.trainers import tinker_cookbook

    tinker_cookbook._group_type.cache_clear()
    yield types
    tinker_cookbook._group_type.cache_clear()


@pytest.fixture
def builder_of(registered, tmp_path):
    """Makes the cookbook's builder of a group of a task, from names."""
    from agentenv.training.loop import save_tokenizer

    save_tokenizer(TOKENIZER, tmp_path)

    def make(task, size):
        made = group_builder(env=SPEC.id, task=task, tokenizer=str(tmp_path), group_size=size, limits=LIMITS)
        return pickle.loads(pickle.dumps(made))

    return make


async def test_the_cookbook_steps_through_an_episode(cookbook, builder_of):
    policy = Policy()
    builder = builder_of(GOOD, 2)
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
    bad_builder = builder_of(BAD, 1)
    (bad,) = await bad_builder.make_envs()
    observation, _ = await bad.initial_observation()
    observation = (await bad.step(policy(observation.to_ints())[0])).next_observation
    with pytest.raises(ae.AgentEnvError, match="broken scorer"):
        await bad.step(policy(observation.to_ints())[0])
    # What the cookbook gives up ends with the group.
    (left,) = await bad_builder.make_envs()
    await left.initial_observation()
    await bad_builder.cleanup()
    assert left.episode._played.cancelled()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
async def test_the_cookbooks_own_loop_trains_the_sampled_tokens(builder_of):
    pytest.importorskip("tinker_cookbook")
    from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
    from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
    from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
    from tinker_cookbook.rl.rollouts import do_group_rollout

    policy, answers = Policy(), iter(["It is 3.<|im_end|>", "It is 4.<|im_end|>"])

    class Completer(TokenCompleter):
        async def __call__(self, model_input, stop, *, max_tokens=None):
            ids, logprobs = policy(model_input.to_ints())
            if TOKENIZER.decode(model_input.to_ints()).count("assistant") > 1:
                ids = TOKENIZER.encode(next(answers, "It is 3.<|im_end|>"))
                logprobs = [-0.5] * len(ids)
                policy.seen[-1] = (policy.seen[-1][0], ids, logprobs)
            assert ids[-1] in stop
            return TokensWithLogprobs(ids, logprobs, "stop")

    played = await do_group_rollout(builder_of(GOOD, 2), Completer())
    assert sorted(played.get_total_rewards()) == [0.0, 1.0]
    data, _ = assemble_training_data([played], compute_advantages([played]))
    wholes = [prompt + ids for prompt, ids, _ in policy.seen]
    assert len(data) == 2
    for datum in data:
        given = {name: value.to_numpy() for name, value in datum.loss_fn_inputs.items()}
        whole = [*datum.model_input.to_ints(), int(given["target_tokens"][-1])]
        assert whole in wholes  # one datum an episode: its last prompt and answer
        begun = [ids for prompt, ids, _ in policy.seen if whole[: len(prompt) + len(ids)] == prompt + ids]
        assert given["mask"].sum() == sum(len(ids) for ids in {tuple(ids) for ids in begun})
        assert set(given["logprobs"][given["mask"] > 0]) <= {-0.25, -0.5, -0.75, -1.0}
    with pytest.raises(ae.AgentEnvError, match="broken scorer"):
        await do_group_rollout(builder_of(BAD, 2), Completer(), strategy=RetryOnFailure(max_retries=1))
