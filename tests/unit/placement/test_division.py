"""Devices are divided so that what each would hold has room, and a plan that does not fit names what does."""

from __future__ import annotations

import json

import pytest
from transformers import Qwen3Config

from agentenv.cli.plan import _lines
from agentenv.core import UsageError
from agentenv.placement import Machine, Trained, model_sizes, plan_capacity
from agentenv.placement.division import ASLEEP
from agentenv.placement.needs import SERVER_EXTRA
from agentenv.training import GRPOConfig, LoraOptions
from agentenv.training.learners.pass_sizes import first_tokens

GIGA = 10**9
BIG = Qwen3Config(
    hidden_size=4096,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
    max_position_embeddings=40960,
    tie_word_embeddings=False,
)
SMALL = Qwen3Config(**{**BIG.to_dict(), "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128})


def plan(gpus: str, context: int = 8192, **options):
    train = GRPOConfig(**{"gradient_checkpointing": True, **options})
    config = json.loads(BIG.to_json_string())
    return plan_capacity(config, train, model="big", context=context, machine=Machine.parse(gpus))


PARAMETERS = 8_190_427_136
"""Those of the matrices of the model, without its norms."""


def test_what_fits_is_divided_between_training_and_sampling():
    found = plan("8x80").placement

    assert found.fits
    assert found.trainers + found.servers * found.tensor_parallel == 8
    assert found.trainer.total <= Machine(8, 80).usable
    assert found.trainer.parts["optimizer"] == 8 * PARAMETERS // found.trainers
    assert found.server is not None
    assert found.server.total == Machine(8, 80).usable


def test_more_devices_need_less_each():
    small, large = plan("8x80").placement, plan("16x80").placement

    assert small.fits
    assert (small.trainers, large.trainers) == (4, 8)
    assert large.trainer.total < small.trainer.total


def test_training_takes_more_than_half_of_the_devices_where_it_needs_them():
    found = plan("4x80", context=16_384).placement

    assert found.fits
    assert (found.trainers, found.servers) == (3, 1)


def test_copies_of_the_model_take_the_memory_of_the_devices_that_share_one():
    one, four = plan("16x80", fsdp=4).placement, plan("8x80", fsdp=4).placement

    assert one.trainers % 4 == 0
    assert one.trainers > four.trainers == 4
    assert one.trainer == four.trainer
    assert one.trainer.parts["weights"] == 2 * PARAMETERS // 4


def test_a_machine_that_cannot_be_divided_into_copies_is_refused():
    with pytest.raises(UsageError, match="fsdp=4 needs 4 devices that train, or a multiple"):
        plan("4x80", fsdp=4)


def test_what_does_not_fit_names_the_nearest_that_does():
    found = plan("8x80", context=32768, gradient_checkpointing=False)

    assert not found.placement.fits
    assert found.placement.missing > 0
    changes = list(found.alternatives)
    assert changes[0] == "-o train.gradient_checkpointing=true"
    assert all(one.fits for one in found.alternatives.values())
    assert any(change.startswith("--context 16384") for change in changes)
    assert any(change.startswith("--gpus 16x80") for change in changes)
    said = "\n".join(_lines(found))
    assert f"without these GPUs:\n  agentenv train ENV -m tinker:{found.model} -o lora.r=32" in said


def test_one_device_trains_adapters_and_samples_from_the_same_weights():
    full, adapters = plan("1x80"), plan("1x80", lora=LoraOptions(r=8))

    assert not full.placement.fits
    assert next(iter(full.alternatives)) == "-o train.optimizer_offload=true"
    assert adapters.placement.fits
    assert adapters.placement.servers == 0


def test_an_offloaded_optimiser_takes_main_memory_and_none_of_the_devices():
    plain, ours = plan("4x80").placement, plan("1x80", optimizer_offload=True).placement

    assert ours.fits
    assert not any(ours.trainer.parts[name] for name in ("masters", "optimizer"))
    assert ours.trainer.parts["gradients"] == 4 * PARAMETERS
    assert ours.main_memory == (4 + 8 + 4) * PARAMETERS
    assert plain.main_memory == 0


def test_a_server_that_sleeps_beside_the_trainer_is_counted_on_the_device_and_in_main_memory():
    lora = LoraOptions(r=8)
    own, server = plan("1x80", lora=lora).placement, plan("1x80", lora=lora, engine="vllm:big").placement
    weights = 2 * PARAMETERS

    assert own.server is not None
    assert server.server is not None
    assert own.server.parts["KV cache"] - server.server.parts["KV cache"] == weights + SERVER_EXTRA
    assert server.trainer.total == own.trainer.total + ASLEEP
    assert (own.asleep, server.asleep) == (0, weights)


def test_each_copy_of_the_model_has_an_optimiser_in_main_memory():
    shards, copies = (plan("8x80", optimizer_offload=True, fsdp=fsdp).placement for fsdp in (True, 2))

    assert shards.main_memory == 16 * PARAMETERS // shards.trainers
    assert copies.main_memory == 16 * PARAMETERS // 2


def test_where_not_even_that_fits_adapters_are_named():
    assert next(iter(plan("1x40").alternatives)) == "-o train.lora.r=16"


def test_the_reference_of_full_weights_takes_room_and_that_of_adapters_none():
    assert plan("8x80", beta=0.1).placement.trainer.parts["reference"] > 0
    assert plan("8x80", beta=0.1, lora=LoraOptions(r=8)).placement.trainer.parts["reference"] == 0


@pytest.mark.parametrize("text", ["8", "x80", "8x", "0x80", "8x80GB"])
def test_a_machine_is_a_number_of_devices_and_their_memory(text):
    with pytest.raises(UsageError, match="number of GPUs"):
        Machine.parse(text)


def test_a_context_beyond_that_of_the_model_is_refused():
    with pytest.raises(UsageError, match="longer than the 40,960"):
        plan("8x80", context=65536)


def test_the_memory_of_a_device_is_not_used_to_the_last_byte():
    assert 70 * GIGA < Machine(1, 80).usable < 80 * GIGA


def activations(gigabytes: int, ranks: int = 1, context: int = 1024, **options) -> int:
    """Return what the micro-batches of a small model keep on a device of this size."""
    sizes = model_sizes(json.loads(SMALL.to_json_string()))
    config = GRPOConfig(dtype="bfloat16", gradient_checkpointing=True, **options)
    return Trained(sizes, config, context).trainer(ranks, gigabytes * GIGA).parts["activations"]


@pytest.mark.parametrize(("gigabytes", "tokens"), [(24, 4096), (48, 8192), (85, 16_384), (141, 16_384)])
def test_a_first_micro_batch_is_counted_as_large_as_the_trainer_makes_it(gigabytes, tokens):
    assert first_tokens(gigabytes * GIGA) == tokens
    assert activations(gigabytes) == activations(gigabytes, tokens_per_micro_batch=tokens)
    assert activations(gigabytes) > activations(gigabytes, tokens_per_micro_batch=tokens // 2)


def test_shards_begin_with_small_micro_batches_because_they_repeat_no_pass():
    assert activations(85, ranks=2) == activations(85, ranks=2, tokens_per_micro_batch=4096)


@pytest.mark.parametrize("given", [None, 16_384])
def test_a_micro_batch_that_would_not_fit_is_counted_as_the_trainer_would_halve_it(given):
    options = {"optimizer_offload": True, "gradient_checkpointing": False}
    halved = plan("1x80", 2048, tokens_per_micro_batch=given, **options).placement

    assert halved.fits
    assert halved == plan("1x80", 2048, tokens_per_micro_batch=2048, **options).placement
