"""Check 7: two processes with an uneven split have the gradient of one, replicated and sharded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from helpers.ranks import run_driver

pytestmark = pytest.mark.slow

REDUCTIONS = ("token_mean", "seq_mean", "constant", "prompt_mean")

# The packages are imported once, here; every rank is a fork of this process, and plays all its cases.
DRIVER = """
import asyncio, copy, json, logging, os, socket, sys, time, traceback
from dataclasses import replace
from datetime import timedelta
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
import agentenv as ae
from agentenv.core import (
    AgentEnvError, EngineError, SequenceBuilder, StopReason, ToolErrorKind, ToolResult, Trajectory, TrajectoryGroup,
    Turn, UsageError
)
from agentenv.engine.hf import TransformersEngine
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import byte_tokenizer
from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer, LoraOptions
from agentenv.training.rows import Row
from agentenv.training.loop.sync import open_engine, push
from agentenv.training.learners.torch.shards import whole
from agentenv.training.learners.torch.passes import accumulate
from agentenv.training.step import assign_weights
from agentenv.training.metrics import Meter

torch.set_num_threads(1)
OUT, REDUCTIONS = sys.argv[1], sys.argv[2:]


def make(sharded, reduction, **more):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2,
        bos_token_id=0, eos_token_id=0,
    )
    options = {"loss_type": "grpo", "reduction": reduction, "max_completion_length": 40, "fsdp": sharded}
    options |= more
    return GRPOTrainer(
        GRPOConfig(packing="padded", tokens_per_micro_batch=12, **options),
        model=GPT2LMHeadModel(config).double().eval(),
    )


def all_rows():
    draw = torch.Generator().manual_seed(1)
    rows = []
    for number, length in enumerate((4, 25, 9, 14)):
        ids = torch.randint(0, 61, (length + 3,), generator=draw).tolist()
        values = torch.randn(2, length, generator=draw, dtype=torch.float64)
        positions = torch.arange(3, length + 3)
        rows.append(Row(ids, positions, values[0] - 4, values[1], number, number // 2))
    return rows


def gradient(how, reduction, split):
    trainer = make(how == "shard", reduction)
    world, rows = trainer.world, all_rows()
    mine = rows if world.size == 1 else (rows[:split] if world.rank == 0 else rows[split:])
    total = float if how == "naive" else world.total
    mine = assign_weights(mine, trainer.config, total=total)
    accumulate(trainer.learner.policy, mine, Meter())
    world.add_gradients(trainer.learner.optimizer)
    grads = [one.grad for one in trainer.learner.optimizer.masters]
    grads = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
    flat = torch.cat([grad.detach().flatten() for grad in grads]) / (2 if how == "naive" else 1)
    norm = trainer.learner.optimizer.step(1e-3)
    if world.rank == 0:
        torch.save((flat, norm), f"{OUT}/{how}-{reduction}-{split}")


def played(env, member, rewards, stop=StopReason.FINAL_ANSWER):
    draw = torch.Generator().manual_seed(100 * len(rewards) + member)
    builder, turns = SequenceBuilder(), []
    builder.append("prompt", [1, 2, 3])
    for number, reward in enumerate(rewards):
        start, length = len(builder), 2 + member + number
        ids = torch.randint(0, 61, (length,), generator=draw).tolist()
        builder.append("model", ids, logprobs=[-4.0 - number] * length, weights_version=-member, turn=number)
        failed = ToolErrorKind.EXCEPTION if member else None
        turns.append(Turn(
            number, {"role": "assistant", "content": "x"}, "stop", length, start=start, reward=reward,
            tool_results=(ToolResult("c", "add", "x", failed),),
        ))
    return Trajectory(
        env, "t", 0, env, stop, member=member, turns=tuple(turns), sequences=(builder.freeze(),),
        reward=sum(rewards), rewards={"part": sum(rewards)},
    )


def scaled_by_batch(how):
    plan = [
        ("test/A-v0", [[0.5], [1.0, 0.25]]),
        ("plain:b", [[3.0], [0.1], [0.0, -2.0]]),
        ("test/A-v0", [[1.0], [1.0]]),
        ("test/A-v0", [[0.0, 0.0, 7.0], [1.0], [0.3, 0.3], [0.2]]),
    ]
    groups = [TrajectoryGroup(tuple(played(env, *one) for one in enumerate(group))) for env, group in plan]
    unscored = replace(played("plain:b", 0, [9.0], StopReason.MAX_TURNS), reward=None)
    groups.append(TrajectoryGroup((unscored, played("plain:b", 1, [2.0]))))
    for level in ("episode", "turn"):
        for split in (1, 3, 5):
            trainer = make(False, "token_mean", scale_rewards="batch", turn_discount={"episode": None, "turn": 1.0}[level], beta=0.1)
            mine = [groups, groups[:split], groups[split:]][(trainer.world.size > 1) + trainer.world.rank]
            metrics = trainer.step(mine)
            if trainer.world.rank == 0:
                with open(f"{OUT}/{how}-{level}-{split}.json", "w") as file:
                    json.dump(metrics, file)


def gradients(how):
    for reduction in REDUCTIONS:
        # Episodes and groups live on one rank each: a group is not split where its tokens count together.
        gradient(how, reduction, 2 if reduction == "prompt_mean" else 3)
    if how in ("replicate", "shard"):
        gradient(how, "seq_mean", 4)  # nothing for the second rank
    if how in ("one", "replicate"):
        scaled_by_batch(how)


def episode(group, member):
    draw = torch.Generator().manual_seed(10 * group + member)
    ids = torch.randint(0, 61, (3 + group + 2 * member,), generator=draw).tolist()
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2, group])
    builder.append("model", ids, logprobs=[-4.0] * len(ids), weights_version=0, turn=0)
    return Trajectory(
        env_id="demo/A-v0", task_id=str(group), seed=0, group_id=str(group), member=member,
        stop_reason=StopReason.FINAL_ANSWER, sequences=(builder.freeze(),), reward=float(member),
        turns=(Turn(0, {"role": "assistant", "content": "x"}, "stop", len(ids), sequence=0, start=3),),
    )


STEPS = {
    "loss": {}, "reward": {"kl_in": "reward"}, "lora": {"lora": LoraOptions(r=4)}, "parts": {"num_minibatches": 2},
}


def stepping(how, case):
    # With Adam's small epsilon a gradient that is zero but for rounding would move its weight.
    again = {"beta": 0.3, "num_iterations": 2, "old_logprobs": "recompute", "adam_epsilon": 1e-4}
    return make(how == "shard", "token_mean", learning_rate=0.01, **again, **STEPS[case])


def take_step(trainer):
    groups = [TrajectoryGroup(tuple(episode(one, n) for n in range(3))) for one in range(3)]
    mine = groups if trainer.world.size == 1 else (groups[:2], groups[2:])[trainer.world.rank]
    return trainer.step(mine)


def keep(trainer, name):
    weights = torch.cat([whole(one.detach()).flatten() for one in trainer.model.parameters()])
    if trainer.world.rank == 0:
        torch.save(weights, f"{OUT}/{name}")


def steps(how):
    for case in STEPS:
        trainer = stepping(how, case)
        done = [take_step(trainer)["updates"] for _ in range(2)]
        assert done == [2.0 * trainer.config.num_minibatches] * 2, done
        keep(trainer, f"saved-{case}-{how}")
        trainer.save(f"{OUT}/checkpoint-{case}-{how}")
        take_step(trainer)
        keep(trainer, f"stepped-{case}-{how}")


def resumed(how):
    for case in ("loss", "lora"):
        for origin in ("one", "shard"):
            trainer = stepping(how, case)
            trainer.resume(f"{OUT}/checkpoint-{case}-{origin}")
            take_step(trainer)
            keep(trainer, f"resumed-{case}-{origin}-{how}")


def refusals(how):
    trainer = make(True, "token_mean", output_dir=f"{OUT}/{how}")

    try:
        open_engine(trainer.learner, None, model_name="")
    except UsageError as error:
        assert "pass engine= with a copy" in str(error)
    else:
        raise AssertionError("a sharded model samples")

    class Broken:
        async def load_weights(self, path, *, version=None):
            raise EngineError("disk on fire")

        load_adapter = load_weights

    for share in (lambda: asyncio.run(push(trainer.learner, Broken(), None)), lambda: trainer.save("/dev/null/x")):
        try:
            share()
        except AgentEnvError as error:
            assert ("another process failed" in str(error)) == (trainer.world.rank == 1), error
        else:
            raise AssertionError("nothing was raised")


def late(how):
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    trainer = make(False, "token_mean")
    if trainer.world.rank == 1:
        time.sleep(2)  # its episodes end after the limit of torch's own group
    assert trainer.world.total(1) == 2
    assert take_step(trainer)["updates"] == 1


class FromDisk(TransformersEngine):
    # One server for all processes: what the first one is told to read, all of them sample from.

    read = None

    async def load_weights(self, path, *, version=None):
        self.weights_version = version
        return version

    async def load_adapter(self, name, path, *, version=None):
        raise NotImplementedError

    async def generate(self, *args, **options):
        if self.read != self.weights_version:
            self.read = self.weights_version
            path = f"{OUT}/pushed/weights/weights-{self.read}/model.safetensors"
            self.model.load_state_dict(load_file(path), strict=False)
        return await super().generate(*args, **options)


class Parrot(ToolEnv):
    def start(self, n: int) -> str:
        return f"say {n}"

    def reward(self, answer: str) -> float:
        return len(answer) / 10


def loop(how):
    torch.manual_seed(0)
    sharded = how not in ("synchronous", "stream")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, initializer_range=0.2, **sizes)).eval()
    followed = []

    def follows(step, metrics):
        if sharded and how != "pushed":
            pairs = zip(trainer.model.parameters(), trainer.engine.model.parameters(), strict=True)
            followed.append(all([torch.equal(whole(ours.detach()), theirs) for ours, theirs in pairs]))

    trainer = GRPOTrainer(
        GRPOConfig(
            fsdp=sharded, groups_per_step=3, num_generations=3, learning_rate=0.02, max_steps=3, save_steps=3,
            refill_rounds=1, eval_on_start=False, output_dir=f"{OUT}/{how}",
            max_ahead={"stream": 2, "sharded stream": 1}.get(how, 0),
        ),
        model=model,
        engine=(FromDisk if how == "pushed" else TransformersEngine)(copy.deepcopy(model)) if sharded else None,
        eval_tasks=[{"n": n} for n in range(3)] if sharded else None,
        callbacks=Callbacks(on_metrics=follows),
        tokenizer=byte_tokenizer(),
        envs=EnvSpec.of("test/Parrot-v0", Parrot, tasks=[{"n": n} for n in range(8)]),
        limits=ae.RunLimits(max_turns=1, max_tokens_per_turn=6),
    )
    history = trainer.train()
    assert all(followed) and len(followed) == (3 if sharded and how != "pushed" else 0), followed
    assert not sharded or history[-1]["eval/tasks"] == 3.0
    weights = torch.cat([whole(one.detach()).flatten() for one in trainer.model.parameters()])
    torch.save(weights, f"{OUT}/{how}-{trainer.world.rank}")
    with open(f"{OUT}/{how}-{trainer.world.rank}.json", "w") as file:
        json.dump([history, trainer.cursors], file)


def of_its_own(layers):
    # What a user's unseeded adapter or head does: every process draws other numbers.
    torch.manual_seed(int(os.environ.get("RANK", 0)))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes)).bfloat16().eval()


def equal_at_the_start(how):
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("agentenv").addHandler(handler)
    model = of_its_own(1)
    model.model.norm.weight.data.fill_(0.5)  # the same in all of them
    model.lm_head.weight.data = model.lm_head.weight.data.t().contiguous().t()
    trainer = GRPOTrainer(GRPOConfig(), model=model)
    rank = trainer.world.rank
    torch.save(torch.cat([one.detach().flatten() for one in trainer.model.parameters()]), f"{OUT}/{how}-{rank}")
    with open(f"{OUT}/{how}-{rank}.json", "w") as file:
        json.dump(said, file)
    try:
        GRPOTrainer(GRPOConfig(), model=of_its_own(1 + rank))
    except UsageError as error:
        assert "models of different shapes" in str(error)
    else:
        raise AssertionError("models of different shapes train together")


def play(work, how, size):
    began = time.perf_counter()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    ranks = []
    for rank in range(size):
        pid = os.fork()
        if pid:
            ranks.append(pid)
            continue
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=str(size), RANK=str(rank), LOCAL_RANK=str(rank)
        )
        try:
            work(how)
            if size > 1:
                dist.destroy_process_group()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert not any([os.waitpid(pid, 0)[1] for pid in ranks]), (how, size)
    print(how, round(time.perf_counter() - began, 1), "s", flush=True)


play(gradients, "one", 1)
for how in ("replicate", "shard", "naive"):
    play(gradients, how, 2)
for how, size in (("one", 1), ("replicate", 2), ("shard", 2)):
    play(steps, how, size)
for how, size in (("one", 1), ("shard", 2)):
    play(resumed, how, size)
play(refusals, "shard", 2)
play(late, "late", 2)  # raises where the limit of the default group holds
play(equal_at_the_start, "replicas", 2)
for how in ("synchronous", "stream", "sharded", "sharded stream", "pushed"):
    play(loop, how, 2)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("processes")
    run_driver(DRIVER, out, *REDUCTIONS)
    return out


def gap(found: Path, how: str, reduction: str, split: int) -> tuple[float, float]:
    """Return how far gradient and norm are from those of one process, relative to its norm."""
    truth, norm = torch.load(found / f"one-{reduction}-{2 if reduction == 'prompt_mean' else 3}")
    split_gradient, split_norm = torch.load(found / f"{how}-{reduction}-{split}")
    return ((split_gradient - truth).norm() / truth.norm()).item(), abs(split_norm - norm) / norm


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("how", ["replicate", "shard"])
def test_two_processes_have_the_gradient_of_one(found, how, reduction):
    gradient, norm = gap(found, how, reduction, 2 if reduction == "prompt_mean" else 3)
    assert gradient <= 1e-12
    assert norm <= 1e-12


@pytest.mark.parametrize("how", ["replicate", "shard"])
def test_a_process_may_have_nothing_to_train_on(found, how):
    assert max(gap(found, how, "seq_mean", 4)) <= 1e-12


@pytest.mark.parametrize("level", ["episode", "turn"])
@pytest.mark.parametrize("split", [1, 3, 5])  # the last leaves the second process nothing
def test_two_processes_have_the_step_of_one_and_its_metrics(found, level, split):
    one, two = (
        json.loads((found / f"{how}-{level}-{split}.json").read_text()) for how in ("one", "replicate")
    )

    assert one.keys() == two.keys()
    assert {"grad_norm", "kl", "reward_std", "rewards/part/std", "plain:b/reward"} <= one.keys()
    for name in one:
        if not name.startswith("time/"):
            assert two[name] == pytest.approx(one[name], rel=1e-12, abs=1e-12), name


@pytest.mark.parametrize("reduction", ["token_mean", "seq_mean"])
def test_the_mean_of_each_process_own_mean_is_wrong(found, reduction):
    assert gap(found, "naive", reduction, 3)[0] > 1e-3


@pytest.mark.parametrize("case", ["loss", "reward", "lora", "parts"])
@pytest.mark.parametrize("how", ["replicate", "shard"])
def test_two_processes_with_a_reference_make_the_steps_of_one(found, how, case):
    truth, ours = (torch.load(found / f"stepped-{case}-{one}") for one in ("one", how))

    assert (ours - truth).norm() <= 1e-12 * truth.norm()


@pytest.mark.parametrize("case", ["loss", "lora"])
@pytest.mark.parametrize("origin", ["one", "shard"])
@pytest.mark.parametrize("how", ["one", "shard"])
def test_a_checkpoint_goes_on_in_any_number_of_processes(found, how, origin, case):
    truth, ours = (
        torch.load(found / f"stepped-{case}-one"),
        torch.load(found / f"resumed-{case}-{origin}-{how}"),
    )

    assert (ours - truth).norm() <= 1e-12 * truth.norm()


def test_a_sharded_model_is_saved_as_transformers_loads_it(found):
    path = found / "checkpoint-loss-shard"

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)

    loaded = torch.cat([one.detach().flatten() for one in model.parameters()])
    assert torch.equal(loaded, torch.load(found / "saved-loss-shard"))
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert set(load_file(path / "model.safetensors")) == set(
        load_file(found / "checkpoint-loss-one" / "model.safetensors")
    )


@pytest.mark.parametrize("how", ["synchronous", "stream", "sharded", "sharded stream", "pushed"])
def test_two_processes_play_their_share_and_keep_equal_weights(found, how):
    (history, cursors), (others, other_cursors) = (
        json.loads((found / f"{how}-{rank}.json").read_text()) for rank in range(2)
    )

    assert torch.equal(torch.load(found / f"{how}-0"), torch.load(found / f"{how}-1"))
    assert cursors == other_cursors
    assert all(one["episodes"] % 3 == 0 and one["episodes"] >= 9 for one in history)
    assert [one["updates"] for one in history] == [1.0, 1.0, 1.0]
    assert [one["loss"] for one in history] == [one["loss"] for one in others]
    assert (found / how / "checkpoints" / "step-3" / "model.safetensors").exists()
    assert len((found / how / "metrics.jsonl").read_text().splitlines()) == 3


def test_processes_with_weights_of_their_own_start_with_those_of_the_first_and_say_so(found):
    first, second = (torch.load(found / f"replicas-{rank}") for rank in range(2))
    said, also_said = (json.loads((found / f"replicas-{rank}.json").read_text()) for rank in range(2))

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).bfloat16()
    model.model.norm.weight.data.fill_(0.5)
    assert torch.equal(first, torch.cat([one.detach().flatten() for one in model.parameters()]))
    assert torch.equal(first, second)
    assert said == also_said
    assert any("9 weights were not the same in all processes" in line for line in said)
