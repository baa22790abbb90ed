"""Models that each process reads its own shards of: the same numbers, and no process holds the whole model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    conversion_mapping,
)
from transformers.core_model_loading import MergeModulelist

from agentenv.engine.hf.load import locate
from agentenv.training import GRPOConfig
from agentenv.training.learners.torch.blank import Merged
from agentenv.training.unread import Refused, unread_model
from helpers.ranks import run_driver

DRIVER = """
import logging, warnings
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
)
from agentenv.core import UsageError
from helpers.memory import most_held

warnings.simplefilter("ignore")
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
}
DEEP = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 40}


def save_models():
    torch.manual_seed(0)
    for tied in (True, False):
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied))
        model.generation_config.max_new_tokens = 7
        model.save_pretrained(f"{OUT}/models/{'tied' if tied else 'untied'}", max_shard_size="20KB")
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.base_model.model.name_or_path = model.peft_config["default"].base_model_name_or_path = f"{OUT}/models/untied"
    model.save_pretrained(f"{OUT}/models/adapter")
    # Without its head the names of the weights have no prefix.
    Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)).model.save_pretrained(f"{OUT}/models/bare")
    moe = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **moe)).save_pretrained(f"{OUT}/models/experts")
    LlamaForCausalLM(LlamaConfig(**DEEP, tie_word_embeddings=False)).save_pretrained(f"{OUT}/models/deep")


CASES = {
    "tied": ("tied", {"beta": 0.1}), "untied": ("untied", {"beta": 0.1}),
    "lora": ("tied", {"beta": 0.1, "lora": LoraOptions(r=2)}), "adapter": ("adapter", {"beta": 0.1}),
    "bare": ("bare", {}), # torch multiplies no experts in float64.
    "experts": ("experts", {"beta": 0.1, "dtype": "float32"}),
}


def trained(case, **options):
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("agentenv").addHandler(handler)
    name, more = CASES[case]
    options |= {"dtype": "float64", "device": "cpu", "adam_epsilon": 1e-4, "learning_rate": 1e-2, **more}
    trainer = GRPOTrainer(GRPOConfig(model=f"{OUT}/models/{name}", **options))
    start = [whole(one.detach()).clone() for one in trainer.model.parameters()]
    buffers = dict(trainer.model.named_buffers())
    groups = [group("a", [0.0, 1.0, 0.3]), group("b", [1.0, 0.0, 0.5])]
    world = trainer.world
    for _ in range(2):
        metrics = trainer.step(groups[world.rank :: world.size])
    end = [whole(one.detach()) for one in trainer.model.parameters()]
    policy = trainer.learner.policy
    layout = (policy.packable, policy.head_way, trainer.model.generation_config.max_new_tokens)
    if world.rank == 0:
        torch.save((start, buffers, end, metrics.get("kl"), layout, said), f"{OUT}/{case}-{world.size}")


def all_cases(**options):
    for case in CASES:
        trained(case, **options)


def other_model():
    rank = os.environ["RANK"]
    torch.manual_seed(int(rank))
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.model.norm.weight.data.uniform_()
    model.save_pretrained(f"{OUT}/models/of-{rank}")
    try:
        GRPOTrainer(GRPOConfig(model=f"{OUT}/models/of-{rank}", fsdp=True, device="cpu"))
    except UsageError as error:
        assert "the processes read different models" in str(error)
    else:
        raise AssertionError("processes train different models together")


def peaks():
    path = f"{OUT}/models/deep"
    options = {"dtype": "float32", "device": "cpu", "gradient_checkpointing": True}
    found = {}
    for beta in (0.0, 0.1):
        config, trainers = GRPOConfig(model=path, fsdp=True, beta=beta, **options), []
        found[str(beta)] = most_held(lambda: trainers.append(GRPOTrainer(config)))
    (trainer,) = trainers
    model = trainer.model
    found["shard"] = sum(one.to_local().numel() for one in model.parameters()) * 4
    found["layer"] = sum(one.numel() for one in model.model.layers[0].parameters()) * 4
    if trainer.world.rank == 0:
        with open(f"{OUT}/peaks.json", "w") as file:
            json.dump(found, file)


save_models()
play(all_cases, 1)
play(lambda: all_cases(fsdp=True), 2)
if COPIES:
    play(lambda: all_cases(fsdp=2), 4)
play(other_model, 2)
play(peaks, 2)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    out = tmp_path_factory.mktemp("unread")
    copies = any("two-copies" in item.name for item in request.session.items)
    run_driver(f"COPIES = {copies}\n{DRIVER}", out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [pytest.param(2, id="one-copy"), pytest.param(4, marks=pytest.mark.exhaustive, id="two-copies")]
)
@pytest.mark.parametrize("case", ["tied", "untied", "lora", "adapter", "bare", "experts"])
def test_a_model_read_in_parts_is_the_one_read_whole_and_learns_the_same(found, case, size):
    start, buffers, end, kl, layout, _ = torch.load(found / f"{case}-1")
    ours, our_buffers, our_end, our_kl, our_layout, _ = torch.load(found / f"{case}-{size}")

    off = 1e-4 if case == "experts" else 1e-12
    assert all(map(torch.equal, ours, start))
    assert our_buffers.keys() == buffers.keys()
    assert all(torch.equal(our_buffers[name], buffers[name]) for name in buffers)
    assert max(float((one - other).abs().max()) for one, other in zip(our_end, end, strict=True)) <= off
    assert our_kl == (None if kl is None else pytest.approx(kl, rel=off))
    assert our_layout == layout


@pytest.mark.slow
def test_only_a_model_whose_weights_have_other_names_is_read_whole_and_a_sentence_says_so(found):
    cases = ("tied", "untied", "lora", "adapter", "bare", "experts")
    said = {case: torch.load(found / f"{case}-2")[-1] for case in cases}

    assert any("bare whole before it is sharded, because its" in line for line in said.pop("bare"))
    assert not any("whole before it is sharded" in line for lines in said.values() for line in lines)


@pytest.mark.slow
def test_the_start_holds_little_more_than_a_shard_and_a_layer(found):
    peaks = json.loads((found / "peaks.json").read_text())

    assert peaks["0.0"] <= 1.3 * peaks["shard"] + peaks["layer"]
    assert peaks["0.1"] <= 1.3 * 2 * peaks["shard"] + peaks["layer"]  # the reference is a second shard


SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}


def refusal(path: Path) -> str:
    with pytest.raises(Refused) as caught:
        unread_model(locate(str(path)), GRPOConfig(fsdp=True, dtype="float32", device="cpu"))
    return str(caught.value)


def test_a_conversion_other_than_merged_experts_is_refused(tmp_path, monkeypatch):
    config = MixtralConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2)
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    monkeypatch.setattr(MergeModulelist, "__init__", lambda self, dim=0: setattr(self, "dim", 1))
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)

    assert "converted while they are loaded" in refusal(tmp_path)


MOE = {"num_experts": 12, "moe_intermediate_size": 8, "decoder_sparse_step": 1, "num_experts_per_tok": 2}
EXPERTS = {
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, **MOE)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SIZES, **HEADS, num_local_experts=12, num_experts_per_tok=2)
    ),
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_merged_as_transformers_merges_them(kind, tmp_path):
    """Of twelve experts the tenth comes after the ninth, and not after the first."""
    EXPERTS[kind]().save_pretrained(tmp_path, max_shard_size="5KB")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)

    model, unread = unread_model(locate(str(tmp_path)), GRPOConfig(fsdp=True, dtype="float32", device="cpu"))

    assert any(isinstance(source, Merged) for source in unread.sources.values())
    unread.fill(model, unread.release(model))
    for ours, truth in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, truth)


def rename(path: Path) -> None:
    (path / "model.safetensors").rename(path / "model.bin")


def configured(**changed: int):
    """Write other values into the config of a model."""

    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | changed))

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (rename, "not in safetensors files"),
        (lambda path: (path / "model.safetensors").write_bytes(b"x" * 40), "is no safetensors file"),
        (configured(vocab_size=62), "another shape in its files"),
        (configured(num_hidden_layers=0), "that the model does not have"),
    ],
)
def test_files_that_are_not_as_the_model_needs_them_are_refused(tmp_path, change, reason):
    LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).save_pretrained(tmp_path)
    change(tmp_path)

    assert reason in refusal(tmp_path)
