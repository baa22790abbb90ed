"""What only GPUs can show of several processes, shards, servers and memory that moves.

`make gpu` runs these. `AGENTENV_TEST_DEVICE=cpu` runs those that make sense there on the CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentenv.placement.on_gpus import divide, machine_of, run_divided
from agentenv.render import byte_tokenizer
from agentenv.training import GRPOConfig, GRPOTrainer
from agentenv.training.loop import save_tokenizer
from helpers.ranks import run_driver
from helpers.scripts import load_benchmark
from helpers.training import group, tiny

DEVICE = os.environ.get("AGENTENV_TEST_DEVICE", "cuda")
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not GPUS,
        reason="there is no CUDA device; AGENTENV_TEST_DEVICE=cpu tries these tests without one",
    ),
    pytest.mark.filterwarnings("default"),
]
vllm_on_cuda = pytest.mark.skipif(
    find_spec("vllm") is None or DEVICE != "cuda", reason="this needs a CUDA device and vLLM"
)
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"this needs two CUDA devices, and {GPUS} can be used")

DRIVER = """
OUT, DEVICE, SIZE, FSDP = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "fsdp"
GROUPS = [group("a", [0.0, 1.0, 0.3]), group("b", [1.0, 0.0, 0.5])]


def train():
    if FSDP and SIZE == 1:  # a single process shards nothing by itself
        dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
        Policy.to_be_sharded = True
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    model = tiny(dtype=torch.float32).to(DEVICE)
    options = {"dtype": "float32", "device": DEVICE, "learning_rate": 1e-2, "adam_epsilon": 1e-3}
    trainer = GRPOTrainer(GRPOConfig(fsdp=FSDP, **options), model=model)
    assert trainer.world.sharded == FSDP
    for _ in range(2):
        metrics = trainer.step(GROUPS[trainer.world.rank :: trainer.world.size])
    weights = [whole(one.detach()).cpu() for one in trainer.model.parameters()]
    if trainer.world.rank == 0:
        torch.save((weights, metrics["grad_norm"], dist.get_backend()), OUT)


play(train, SIZE)
"""


def trained_by(processes: int, how: str, out: Path) -> tuple[list[torch.Tensor], float, str]:
    """Return the weights after two steps, the norm of the last gradient, and what connected the processes."""
    run_driver(DRIVER, out, DEVICE, str(processes), how)
    return torch.load(out)


def trained_alone() -> tuple[list[torch.Tensor], float]:
    options = {"dtype": "float32", "device": DEVICE, "learning_rate": 1e-2, "adam_epsilon": 1e-3}
    trainer = GRPOTrainer(GRPOConfig(**options), model=tiny(dtype=torch.float32).to(DEVICE))
    for _ in range(2):
        metrics = trainer.step([group("a", [0.0, 1.0, 0.3]), group("b", [1.0, 0.0, 0.5])])
    return [one.detach().cpu() for one in trainer.model.parameters()], metrics["grad_norm"]


def assert_same(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor], most: float = 1e-4) -> None:
    gaps = [float((one - other).detach().abs().max()) for one, other in zip(ours, theirs, strict=True)]
    assert max(gaps) <= most


def test_a_single_process_trains_shards_as_it_trains_a_whole_model(tmp_path):
    weights, norm, _ = trained_by(1, "fsdp", tmp_path / "out")
    truth, wanted = trained_alone()

    assert_same(weights, truth)
    assert norm == pytest.approx(wanted, rel=1e-3)


def test_two_processes_train_one_run_also_on_one_gpu_where_gloo_connects_them(tmp_path):
    weights, norm, backend = trained_by(2, "replicas", tmp_path / "out")
    truth, wanted = trained_alone()

    assert_same(weights, truth)
    assert norm == pytest.approx(wanted, rel=1e-3)
    assert ("nccl" in backend) == (GPUS > 1 and DEVICE == "cuda")


@two_gpus
def test_two_gpus_train_shards_as_one_trains_a_whole_model(tmp_path):
    weights, norm, backend = trained_by(2, "fsdp", tmp_path / "out")
    truth, wanted = trained_alone()

    assert_same(weights, truth)
    assert norm == pytest.approx(wanted, rel=1e-3)
    assert "nccl" in backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_optimiser_makes_the_same_steps_and_holds_nothing_on_the_device(dtype):
    def trained(offload: bool) -> GRPOTrainer:
        name = str(dtype).removeprefix("torch.")
        config = GRPOConfig(dtype=name, device=DEVICE, learning_rate=1e-3, optimizer_offload=offload)
        trainer = GRPOTrainer(config, model=tiny(dtype=dtype).to(DEVICE))
        for _ in range(2):
            trainer.step([group("a", [0.0, 1.0, 0.3])])
        return trainer

    plain, ours = trained(False), trained(True)
    states = ours.learner.optimizer.inner.state.values()

    assert_same(ours.model.parameters(), plain.model.parameters(), 1e-5 if dtype == torch.float32 else 1e-2)
    assert {one.device.type for one in ours.learner.optimizer.masters} == {"cpu"}
    assert {one.device.type for held in states for one in held.values()} == {"cpu"}


def test_layers_of_an_8b_model_take_at_most_what_a_plan_counts(tmp_path):
    large = load_benchmark("large")
    quick = DEVICE == "cpu"
    sizes, tokens = (large.SMALL, 256) if quick else (large.SIZES, 32_768)

    found = large.measured("plain", sizes, tokens, DEVICE)

    assert found["seconds"] > 0
    assert quick or found["GB"] <= 1.1 * found["plan"]


def saved_model(path: Path) -> str:
    """Save a small model of a shape that vLLM's kernels take."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    save_tokenizer(tokenizer, path)
    return str(path)


LENGTHS = """
import agentenv as ae
class Lengths(ae.ToolEnv):
    def start(self, n: int) -> str:
        return f"say {n}"
    def reward(self, answer: str) -> float:
        return len(answer) / 100
ae.register("demo/Lengths-v0", Lengths, tasks=[{"n": n} for n in range(9)])
"""
WORDS = ["lengths.py", "--steps", "3", "-k", "4", "--demos", "none", "-o", "groups_per_step=4"]
WORDS += ["-o", "limits.max_turns=1", "-o", "limits.max_tokens_per_turn=32"]


def metrics_under(runs: Path) -> list[dict[str, float]]:
    (file,) = runs.glob("*/metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@vllm_on_cuda
def test_a_server_sleeps_and_wakes_around_each_update(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lengths.py").write_text(LENGTHS)
    model = saved_model(tmp_path / "model")
    engine = ["-o", f"train.engine=vllm:{model}", "-o", "engine.sleep=true"]
    subprocess.run([sys.executable, "-m", "agentenv", "train", *WORDS, "-m", model, *engine], check=True)

    steps = metrics_under(tmp_path / "runs")
    assert [step["weights_version"] for step in steps] == [1, 2, 3]
    assert all(step["sync/frac_outside"] < 0.3 for step in steps if "sync/frac_outside" in step)


@vllm_on_cuda
@two_gpus
def test_two_gpus_are_divided_between_training_and_a_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lengths.py").write_text(LENGTHS)
    model = saved_model(tmp_path / "model")
    division = divide(model, GRPOConfig(tokens_per_micro_batch=1024), machine_of("2"), 512)

    code = run_divided(division, model, [*WORDS, "-m", model], tmp_path / "logs")

    assert code == 0
    assert (division.trainers, division.servers) == ((0,), ((1,),))
    assert [step["weights_version"] for step in metrics_under(tmp_path / "runs")] == [1, 2, 3]


@vllm_on_cuda
@two_gpus
def test_nccl_brings_weights_from_one_gpu_to_a_server_on_the_other(tmp_path):
    weights = load_benchmark("weights")
    with weights.served(saved_model(tmp_path / "model"), 0.4) as url:
        found = asyncio.run(weights.main(url, 1, ("nccl",)))

    assert isinstance(found["nccl"], float), found["nccl"]
