"""Checkpoints of sharded models: any number of processes resumes them, and failures are told to all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.ranks import run_driver

pytestmark = pytest.mark.slow

# The packages are imported once, here; every rank is a fork of this process, and computes all its cases.
DRIVER = """
import resource, sys
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from transformers import GPT2Config, GPT2LMHeadModel
from agentenv.core import AgentEnvError
from agentenv.training import GRPOConfig, GRPOTrainer, LoraOptions
from agentenv.training.loop import last_checkpoint
from agentenv.training.loop import checkpoint as checkpoints
from agentenv.training.learners.torch.shards import whole
from helpers.ranks import play
from helpers.training import group

torch.set_num_threads(1)
OUT = Path(sys.argv[1])
CASES = {"full": {}, "lora": {"lora": LoraOptions(r=2)}}  # in four processes two have none of a rank of 2


def make(sharded, dtype=torch.float64, **options):
    # Float64 through and through: Llama's norm computes in float32 whatever its weights are.
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2,
        bos_token_id=0, eos_token_id=0,
    )
    options |= {"learning_rate": 1e-2, "adam_epsilon": 1e-4, "packing": "padded", "fsdp": sharded}
    return GRPOTrainer(GRPOConfig(**options), model=GPT2LMHeadModel(config).to(dtype).eval())


def step(trainer):
    groups = [group(str(number), [0.0, 1.0, 0.3]) for number in range(4)]
    trainer.step(groups[trainer.world.rank :: trainer.world.size])


def keep(trainer, name):
    weights = torch.cat([whole(one.detach()).flatten().double() for one in trainer.model.parameters()])
    if trainer.world.rank == 0:
        torch.save(weights, OUT / name)


def begun(sharded):
    for case, options in CASES.items():
        trainer = make(sharded, **options)
        step(trainer), step(trainer)
        size = named(sharded, trainer)
        trainer.save(OUT / f"{case}-{size}")
        step(trainer)
        keep(trainer, f"stepped-{case}-{size}")


def named(sharded, trainer):
    size = trainer.world.size
    return size if isinstance(sharded, bool) else f"{size // sharded}x{sharded}"


def resumed(origin, sharded):
    for case, options in CASES.items():
        trainer = make(sharded, **options)
        trainer.resume(OUT / f"{case}-{origin}")
        keep(trainer, f"resumed-{case}-{origin}-{named(sharded, trainer)}")
        step(trainer)
        keep(trainer, f"stepped-{case}-{origin}-{named(sharded, trainer)}")


def low_precision(sharded=True):
    trainer = make(sharded, torch.bfloat16)
    name = f"low-{named(sharded, trainer)}"
    step(trainer)
    trainer.save(OUT / name)
    step(trainer)
    again = make(sharded, torch.bfloat16)
    again.resume(OUT / name)
    step(again)
    keep(trainer, f"{name}-went-on"), keep(again, f"{name}-resumed")


def warmed_up(sharded=True):
    trainer = make(sharded, torch.bfloat16)
    trainer.warmup(list(group("shown", [1.0, 1.0])), steps=2, learning_rate=1e-3)
    optimizer = trainer.learner.optimizer
    kept = [
        (master.to_local(), weight.detach().to_local().float())
        for weight, master in zip(optimizer.parameters, optimizer.masters, strict=True)
    ]
    torch.save(kept, OUT / f"masters-{named(sharded, trainer)}-{trainer.world.rank}")
    step(trainer)


def failures():
    trainer = make(True, output_dir=str(OUT / "run"))
    step(trainer)
    saved = trainer.save_step()
    second = trainer.world.rank == 1

    def refused(said):
        try:
            trainer.save_step()
        except AgentEnvError as error:
            assert said in str(error), error
        else:
            raise AssertionError("a checkpoint without all its parts is saved")
        dist.barrier()
        assert last_checkpoint(OUT / "run") == saved
        assert [one.name for one in (OUT / "run" / "checkpoints").iterdir()] == ["step-1"]

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if second:  # its disk is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    refused("cannot write the optimiser's state")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if second:  # its disk is another one
        (OUT / "elsewhere" / "optimizer").mkdir(parents=True)
        checkpoints.partial_of = lambda path: OUT / "elsewhere"
    refused("does not hold what the other processes wrote")
    trainer.resume(saved)


play(lambda: begun(False), 1)
play(lambda: begun(True), 4)
for origin, size in ((4, 2), (1, 4), (4, 4)):
    play(lambda: resumed(origin, True), size)
play(low_precision, 2)
play(warmed_up, 2)
play(failures, 2)
if COPIES:
    play(lambda: begun(2), 4)
    play(lambda: resumed("2x2", False), 1)
    for origin in (4, "2x2"):
        play(lambda: resumed(origin, 2), 4)
    play(lambda: (low_precision(2), warmed_up(2)), 4)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    out = tmp_path_factory.mktemp("parts")
    copies = any("2x2" in item.name for item in request.session.items)
    run_driver(f"COPIES = {copies}\n{DRIVER}", out)
    return out


def two_by_two(*sizes: object):
    """Mark a case with two copies of a model in two parts."""
    return pytest.param(*sizes, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("case", ["full", "lora"])
@pytest.mark.parametrize(
    ("origin", "size"),
    [(4, 2), (1, 4), (4, 4), two_by_two("2x2", 1), two_by_two(4, "2x2"), two_by_two("2x2", "2x2")],
)
def test_any_number_of_processes_goes_on_as_if_nothing_had_stopped(found, origin, size, case):
    truth = torch.load(found / f"stepped-{case}-{origin}")
    ours = torch.load(found / f"stepped-{case}-{origin}-{size}")

    assert not torch.equal(ours, torch.load(found / f"resumed-{case}-{origin}-{size}"))
    assert (ours - truth).abs().max() <= 1e-14
    assert origin != size or torch.equal(ours, truth)


@pytest.mark.parametrize("size", ["2", two_by_two("2x2")])
def test_masters_of_low_precision_weights_are_resumed_exactly(found, size):
    assert torch.equal(torch.load(found / f"low-{size}-resumed"), torch.load(found / f"low-{size}-went-on"))


@pytest.mark.parametrize(("size", "ranks"), [("2", 2), two_by_two("2x2", 4)])
def test_masters_of_a_sharded_warm_up_keep_what_rounding_took_from_the_weights(found, size, ranks):
    for rank in range(ranks):
        kept = torch.load(found / f"masters-{size}-{rank}")
        assert all(torch.equal(master.bfloat16().float(), weight) for master, weight in kept)
        assert any(not torch.equal(master, weight) for master, weight in kept)


@pytest.mark.parametrize("size", ["4", two_by_two("2x2")])
def test_each_process_writes_its_own_part_of_the_optimiser_and_the_model_is_whole(found, size):
    one, four = found / "full-1", found / f"full-{size}"

    assert not (one / "optimizer").exists()
    files = sorted((four / "optimizer").iterdir())
    assert len(files) == 4
    assert sum(tensor.numel() for file in files for tensor in load_file(file).values()) == 2 * sum(
        tensor.numel() for tensor in load_file(four / "model.safetensors").values()
    )  # the two moments of Adam
    assert (four / "trainer_state.pt").stat().st_size < 0.5 * (one / "trainer_state.pt").stat().st_size
    shapes = [
        {name: tensor.shape for name, tensor in load_file(path / "model.safetensors").items()}
        for path in (one, four)
    ]
    assert shapes[0] == shapes[1]
