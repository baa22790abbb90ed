"""Check 7: two processes with an uneven split have the gradient of one, replicated and sharded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

REDUCTIONS = ("token_mean", "seq_mean", "constant", "prompt_mean")

# The packages are imported once, here; every rank is a fork of this process, and plays all its cases.
DRIVER = """
import json, os, socket, sys, time, traceback
from dataclasses import replace
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
import agentenv as ae
from agentenv.envspec import EnvSpec
from agentenv.render import byte_tokenizer
from agentenv.toolenv import ToolEnv
from agentenv.train import GRPOConfig, GRPOTrainer
from agentenv.train.batch import Row
from agentenv.train.metrics import Meter
from agentenv.train.update import accumulate, assign_weights
from agentenv.messages import ToolErrorKind, ToolResult
from agentenv.trajectory import SequenceBuilder, StopReason, Trajectory, TrajectoryGroup, Turn

torch.set_num_threads(1)
OUT, REDUCTIONS = sys.argv[1], sys.argv[2:]


def make(sharded, reduction, **others):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2,
        bos_token_id=0, eos_token_id=0,
    )
    options = {"loss_type": "grpo", "reduction": reduction, "max_completion_length": 40, "fsdp": sharded}
    return GRPOTrainer(
        GRPOConfig(packing="padded", tokens_per_micro_batch=12, **options, **others),
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
    assign_weights(mine, trainer.config, total=total)
    accumulate(trainer.policy, mine, Meter())
    world.add_gradients(trainer.optimizer)
    grads = [one.grad for one in trainer.optimizer.masters]
    grads = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
    flat = torch.cat([grad.detach().flatten() for grad in grads]) / (2 if how == "naive" else 1)
    norm = trainer.optimizer.step(1e-3)
    if world.rank == 0:
        torch.save((flat, norm), f"{OUT}/{how}-{reduction}-{split}")


def episode(env, member, rewards, stop=StopReason.FINAL_ANSWER):
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


def steps(how):
    played = [
        ("test/A-v0", [[0.5], [1.0, 0.25]]),
        ("plain:b", [[3.0], [0.1], [0.0, -2.0]]),
        ("test/A-v0", [[1.0], [1.0]]),
        ("test/A-v0", [[0.0, 0.0, 7.0], [1.0], [0.3, 0.3], [0.2]]),
    ]
    groups = [TrajectoryGroup(tuple(episode(env, *one) for one in enumerate(group))) for env, group in played]
    unscored = replace(episode("plain:b", 0, [9.0], StopReason.MAX_TURNS), reward=None)
    groups.append(TrajectoryGroup((unscored, episode("plain:b", 1, [2.0]))))
    for level in ("episode", "turn"):
        for split in (1, 3, 5):
            trainer = make(False, "token_mean", scale_rewards="batch", advantage_level=level, beta=0.1)
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
        steps(how)


class Parrot(ToolEnv):
    def start(self, n: int) -> str:
        return f"say {n}"

    def reward(self, answer: str) -> float:
        return len(answer) / 10


def loop(how):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    trainer = GRPOTrainer(
        GRPOConfig(
            groups_per_step=3, num_generations=3, learning_rate=0.02, max_steps=3, save_steps=3,
            refill_rounds=1, output_dir=f"{OUT}/{how}", asynchronous=how == "asynchronous", top_kl_tokens=2,
        ),
        model=LlamaForCausalLM(LlamaConfig(vocab_size=300, initializer_range=0.2, **sizes)).eval(),
        tokenizer=byte_tokenizer(),
        envs=EnvSpec.of("test/Parrot-v0", Parrot, tasks=[{"n": n} for n in range(8)]),
        limits=ae.RunLimits(max_turns=1, max_tokens_per_turn=6),
    )
    history = trainer.train()
    weights = torch.cat([one.detach().flatten() for one in trainer.model.parameters()])
    torch.save(weights, f"{OUT}/{how}-{trainer.world.rank}")
    with open(f"{OUT}/{how}-{trainer.world.rank}.json", "w") as file:
        json.dump([history, trainer.cursors], file)


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
for how in ("synchronous", "asynchronous"):
    play(loop, how, 2)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("processes")
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(out), *REDUCTIONS],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def gap(found: Path, how: str, reduction: str, split: int) -> tuple[float, float]:
    """Return how far gradient and norm are from those of one process, relative to its norm."""
    truth, norm = torch.load(found / f"one-{reduction}-{2 if reduction == 'prompt_mean' else 3}")
    split_gradient, split_norm = torch.load(found / f"{how}-{reduction}-{split}")
    return ((split_gradient - truth).norm() / truth.norm()).item(), abs(split_norm - norm) / norm


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("how", ["replicate", "shard"])
def test_check_07_two_processes_have_the_gradient_of_one(found, how, reduction):
    gradient, norm = gap(found, how, reduction, 2 if reduction == "prompt_mean" else 3)
    assert gradient <= 1e-12
    assert norm <= 1e-12


@pytest.mark.parametrize("how", ["replicate", "shard"])
def test_check_07_a_process_may_have_nothing_to_train_on(found, how):
    assert max(gap(found, how, "seq_mean", 4)) <= 1e-12


@pytest.mark.parametrize("level", ["episode", "turn"])
@pytest.mark.parametrize("split", [1, 3, 5])  # the last leaves the second process nothing
def test_check_07_two_processes_have_the_step_of_one_and_its_metrics(found, level, split):
    one, two = (
        json.loads((found / f"{how}-{level}-{split}.json").read_text()) for how in ("one", "replicate")
    )

    assert one.keys() == two.keys()
    assert {"grad_norm", "kl", "reward_std", "rewards/part/std", "plain:b/reward"} <= one.keys()
    for name in one:
        if not name.startswith("time/"):
            assert two[name] == pytest.approx(one[name], rel=1e-12, abs=1e-12), name


@pytest.mark.parametrize("reduction", ["token_mean", "seq_mean"])
def test_check_07_the_mean_of_each_process_own_mean_is_wrong(found, reduction):
    assert gap(found, "naive", reduction, 3)[0] > 1e-3


@pytest.mark.parametrize("how", ["synchronous", "asynchronous"])
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
