"""Devices are divided so that what each would hold has room, and a plan that does not fit names what does."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from agentenv.cli.plan import _lines
from agentenv.core import UsageError
from agentenv.placement import DryRuns, Machine, model_shape, plan_capacity
from agentenv.placement.needs import ASLEEP, SERVER_EXTRA
from agentenv.placement.shape import empty_model
from agentenv.training import GRPOConfig, LoraOptions
from helpers.seeing import SEERS, config_of, tokenizer_of

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


class Known(DryRuns):
    """Dry runs with known results: so many bytes for each token of the row, beside the gradients."""

    def peak(self, config, context, ranks):
        tokens = max(context, config.tokens_per_micro_batch or 4096)
        return (
            tokens * (50_000 if config.gradient_checkpointing else 5_000_000)
            + 4 * self.trained(config) // ranks
        )

    def trained(self, config):
        return self.shape.parameters if config.lora is None else 40_000_000


def plan(gpus: str, context: int = 8192, **options):
    config = GRPOConfig(**{"gradient_checkpointing": True, **options})
    return plan_capacity(Known(BIG), config, model="big", context=context, machine=Machine.parse(gpus))


def test_the_sizes_of_a_model_come_from_its_config():
    shape = model_shape(BIG)

    assert shape.parameters == shape.active == 8_190_735_360
    assert shape.layers == 36
    assert shape.head == 151936 * 4096
    assert shape.cache_values == 2 * 36 * 8 * 128
    assert shape.root + 36 * shape.largest_layer == shape.parameters


@pytest.mark.parametrize("family", SEERS)
def test_the_tower_of_a_model_that_sees_is_counted(family):
    config = config_of(family, tokenizer_of(family).backend)
    model = empty_model(config, torch.bfloat16)
    tower = sum(one.numel() for name, one in model.named_parameters() if not is_language(name))

    runs = DryRuns(config)

    assert runs.shape.parameters == sum(one.numel() for one in model.parameters())
    assert runs.trained(GRPOConfig()) == runs.shape.parameters - tower
    assert runs.trained(GRPOConfig(train_vision=True)) == runs.shape.parameters


def is_language(name):
    return any(word in name for word in ("language_model", "text_model", "lm_head"))


def test_a_token_uses_few_of_the_experts():
    config = Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=100,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )

    shape = model_shape(config)

    assert shape.parameters - shape.active == 2 * 6 * 3 * 64 * 16


def test_what_fits_is_divided_between_training_and_sampling():
    found = plan("8x80").placement

    assert found.fits
    assert found.trainers + found.servers * found.tensor_parallel == 8
    assert found.trainer.total <= found.usable
    assert found.trainer.parts["optimizer"] == 8 * 8_190_735_360 // found.trainers
    assert found.server is not None
    assert found.server.total == found.usable
    assert found.seconds is not None
    assert found.seconds.total > 0


def test_more_devices_need_less_each_and_fewer_seconds():
    small, large = plan("4x80").placement, plan("16x80").placement

    assert small.fits
    assert large.trainer.total < small.trainer.total
    assert small.seconds is not None
    assert large.seconds is not None
    assert large.seconds.total < small.seconds.total


def test_copies_of_the_model_take_the_memory_of_the_devices_that_share_one():
    one, four = plan("16x80", fsdp=4).placement, plan("8x80", fsdp=4).placement

    assert one.trainers % 4 == 0
    assert one.trainers > four.trainers == 4
    assert one.trainer == four.trainer
    assert one.trainer.parts["weights"] == 2 * 8_190_735_360 // 4


def test_a_machine_that_cannot_be_divided_into_copies_is_refused():
    with pytest.raises(UsageError, match="fsdp=4 needs 4 devices that train, or a multiple"):
        plan("4x80", fsdp=4)


def test_what_does_not_fit_names_the_nearest_that_does():
    found = plan("8x80", context=32768, gradient_checkpointing=False)

    assert not found.placement.fits
    assert found.placement.missing > 0
    changes = [one.change for one in found.alternatives]
    assert changes[0] == "-o train.gradient_checkpointing=true"
    assert all(one.placement.fits for one in found.alternatives)
    assert any(change.startswith("--context 16384") for change in changes)
    assert any(change.startswith("--gpus 16x80") for change in changes)
    said = "\n".join(_lines(found))
    assert f"without these GPUs:\n  agentenv train ENV -m tinker:{found.model} -o lora.r=32" in said


def test_one_device_trains_adapters_and_samples_from_the_same_weights():
    full, adapters = plan("1x80"), plan("1x80", lora=LoraOptions(r=8))

    assert not full.placement.fits
    assert full.alternatives[0].change == "-o train.optimizer_offload=true"
    assert adapters.placement.fits
    assert adapters.placement.servers == 0


def test_an_offloaded_optimiser_takes_main_memory_and_none_of_the_devices():
    plain, ours = plan("4x80").placement, plan("1x80", optimizer_offload=True).placement

    assert ours.fits
    assert not any(ours.trainer.parts[name] for name in ("masters", "optimizer", "optimizer step"))
    assert ours.trainer.parts["gradients"] == 4 * 8_190_735_360
    assert ours.main_memory == (4 + 8 + 4) * 8_190_735_360
    assert plain.main_memory == 0


def test_a_model_that_is_loaded_whole_takes_main_memory_and_a_device_for_it():
    quantised = copy.deepcopy(BIG)
    quantised.quantization_config = {"quant_method": "fp8"}
    lora = GRPOConfig(gradient_checkpointing=True, lora=LoraOptions(r=8))

    def needed(config, gpus):
        machine = Machine.parse(gpus)
        return plan_capacity(Known(config), lora, model="big", context=512, machine=machine).placement

    parts, whole, single = needed(BIG, "16x80"), needed(quantised, "16x80"), needed(BIG, "1x80")

    assert parts.trainer.parts.get("loading", 0) == parts.loading == 0, "each process reads its own parts"
    assert whole.trainer.parts["loading"] > 0
    assert whole.trainer.total == whole.loading == 2 * 8_190_735_360
    assert single.loading == 2 * 8_190_735_360


def test_a_server_that_sleeps_beside_the_trainer_is_counted_on_the_device_and_in_main_memory():
    lora = LoraOptions(r=8)
    own, server = plan("1x80", lora=lora).placement, plan("1x80", lora=lora, engine="vllm:big").placement
    weights = 2 * 8_190_735_360

    assert own.server is not None
    assert server.server is not None
    assert own.server.parts["KV cache"] - server.server.parts["KV cache"] == weights + SERVER_EXTRA
    assert server.trainer.total == own.trainer.total + ASLEEP
    assert (own.asleep, server.asleep) == (0, weights)


def test_a_step_in_main_memory_takes_longer():
    plain, ours = (plan("8x80", optimizer_offload=offload).placement for offload in (False, True))

    assert ours.trainers == plain.trainers
    assert ours.main_memory == 16 * 8_190_735_360 // ours.trainers
    assert ours.seconds.update > plain.seconds.update + 28 * 8_190_735_360 / 1e11
    copies = plan("8x80", optimizer_offload=True, fsdp=2).placement
    assert copies.main_memory == 16 * 8_190_735_360 // 2


def test_gradients_that_are_added_in_each_pass_are_named_only_where_that_is_needed():
    assert plan("2x80").alternatives[0].change == "-o train.optimizer_offload=true"


def test_where_not_even_that_fits_adapters_are_named():
    assert plan("1x40").alternatives[0].change == "-o train.lora.r=16"


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
