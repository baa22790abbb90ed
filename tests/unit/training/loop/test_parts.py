"""Checkpoints of sharded models: any number of processes resumes them, and failures are told to all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers.ranks import run_driver

pytestmark = pytest.mark.slow

DRIVER = """
import resource
from agentenv.core import AgentEnvError
from agentenv.training.loop import last_checkpoint
from agentenv.training.loop import checkpoint as checkpoints

OUT = Path(OUT)
OFFLOAD = {"optimizer_offload": True, "weight_decay": 0.1}
CASES = {"full": {}, "offload": OFFLOAD, "lora": {"lora": LoraOptions(r=2)}}  # in four processes two have none of a rank of 2


def make(sharded, dtype=torch.float64, **options):
    options |= {"learning_rate": 1e-2, "adam_epsilon": 1e-4, "packing": "padded", "fsdp": sharded}
    return GRPOTrainer(GRPOConfig(**options), model=tiny_gpt2().to(dtype))


def step(trainer):
    groups = [group(str(number), [0.0, 1.0, 0.3]) for number in range(4)]
    trainer.step(groups[trainer.world.rank :: trainer.world.size])


def begun(sharded):
    for case, options in CASES.items():
        trainer = make(sharded, **options)
        step(trainer), step(trainer)
        size = named(sharded, trainer)
        trainer.save(OUT / f"{case}-{size}")
        keep(trainer, OUT / f"saved-{case}-{size}")
        step(trainer)
        keep(trainer, OUT / f"stepped-{case}-{size}")


def named(sharded, trainer):
    size = trainer.world.size
    return size if isinstance(sharded, bool) else f"{size // sharded}x{sharded}"


def resumed(origin, sharded):
    for case, options in CASES.items():
        trainer = make(sharded, **options)
        trainer.resume(OUT / f"{case}-{origin}")
        keep(trainer, OUT / f"resumed-{case}-{origin}-{named(sharded, trainer)}")
        step(trainer)
        keep(trainer, OUT / f"stepped-{case}-{origin}-{named(sharded, trainer)}")


def low_precision(sharded=True):
    trainer = make(sharded, torch.bfloat16)
    name = f"low-{named(sharded, trainer)}"
    step(trainer)
    trainer.save(OUT / name)
    step(trainer)
    again = make(sharded, torch.bfloat16)
    again.resume(OUT / name)
    step(again)
    keep(trainer, OUT / f"{name}-went-on"), keep(again, OUT / f"{name}-resumed")


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
for origin, size in ((4, 1), (4, 2), (1, 4), (4, 4)):
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


@pytest.mark.parametrize("case", ["full", "offload", "lora"])
@pytest.mark.parametrize(
    ("origin", "size"),
    [(4, 1), (4, 2), (1, 4), (4, 4), two_by_two("2x2", 1), two_by_two(4, "2x2"), two_by_two("2x2", "2x2")],
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
    model = AutoModelForCausalLM.from_pretrained(four, dtype=torch.float64)
    loaded = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert torch.equal(loaded, torch.load(found / f"saved-full-{size}"))
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert load_file(four / "model.safetensors").keys() == load_file(one / "model.safetensors").keys()
