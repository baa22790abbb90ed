"""Rows that are prefilled as one packed row have the numbers of padded rows, and those of a row alone."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from agentenv.engine.hf.core import PREFILL_TOKENS, SHARED_COLUMNS, ForwardCore
from agentenv.engine.hf.packed import PaddingCost

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
CONFIGS = {"llama": LlamaConfig(**SIZES), "qwen3": Qwen3Config(**SIZES, head_dim=16)}


def core_of(config, dtype=torch.float32) -> ForwardCore:
    torch.manual_seed(0)
    return ForwardCore(AutoModelForCausalLM.from_config(config, dtype=dtype).eval())


def tokens(count: int, seed: int) -> list[int]:
    return [(7 + 31 * index + 101 * seed) % 300 for index in range(count)]


def prefilled(core: ForwardCore, entries, prefill) -> tuple[torch.Tensor, list]:
    """Add rows by one kind of pass; return the logits after each row and the keys and values."""
    core.buffers.clear()
    for saved, length, _ in entries:
        core.buffers.append(None if saved is None else saved.cut(length))
    with torch.no_grad():
        logits = prefill(0, [new for _, _, new in entries])
        decoded = core.decode([5] * len(entries))
    saved = [core.buffers.save(row) for row in range(len(entries))]
    return torch.cat([logits, decoded]), saved


def shapes_of_passes(core: ForwardCore, monkeypatch) -> list[tuple[int, ...]]:
    """Return a list that gets the shape of the token ids of each pass."""
    passes: list[tuple[int, ...]] = []
    inner = core.model.forward

    def watched(*args, **given):
        passes.append(tuple(given["input_ids"].shape))
        return inner(*args, **given)

    monkeypatch.setattr(core.model, "forward", watched)
    return passes


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", [(1, 9, 30), (12, 3), (5, 5, 5), (40,)])
def test_a_packed_row_has_the_numbers_of_padded_rows_and_of_single_ones(name, lengths):
    core = core_of(CONFIGS[name])
    assert core.packs
    fresh = [(None, 0, tokens(length, seed)) for seed, length in enumerate(lengths)]
    _, kept = prefilled(
        core, [(None, 0, tokens(20, 50 + seed)) for seed in range(len(lengths))], core._packed_pass
    )
    begun = [
        (row, 20 if seed else 7, new) for seed, (row, (_, _, new)) in enumerate(zip(kept, fresh, strict=True))
    ]
    entries = [*fresh, *begun]

    packed, rows = prefilled(core, entries, core._packed_pass)
    padded, padded_rows = prefilled(core, entries, core._prefill_pass)
    alone = [prefilled(core, [entry], core._prefill_pass)[0] for entry in entries]

    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        packed, torch.cat([torch.stack(one) for one in zip(*alone, strict=True)]), rtol=1e-5, atol=1e-5
    )
    for ours, theirs in zip(rows, padded_rows, strict=True):
        assert ours.length == theirs.length
        for left, right in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_rows_of_bfloat16_are_packed_too():
    core = core_of(CONFIGS["llama"], torch.bfloat16)
    entries = [(None, 0, tokens(length, length)) for length in (3, 40)]

    packed, _ = prefilled(core, entries, core._packed_pass)
    padded, _ = prefilled(core, entries, core._prefill_pass)

    assert core.packs
    torch.testing.assert_close(packed, padded, rtol=0.05, atol=0.05)


def test_rows_of_all_lengths_share_a_pass_without_padding(monkeypatch):
    core = core_of(CONFIGS["llama"])
    passes = shapes_of_passes(core, monkeypatch)

    core.prefill([(None, 0, tokens(length, 1)) for length in (1, 200, 1800)])

    assert passes == [(1, 2001)]
    assert core.fit_together([1, 200, 1800])
    assert not core.fit_together([1, 200, PREFILL_TOKENS])


def test_a_model_whose_attention_does_not_take_shared_columns_gets_copies(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaModel

    inner = LlamaModel.forward

    def forgetful(self, *args, shared=None, **given):
        return inner(self, *args, **given)

    assert core_of(CONFIGS["llama"]).buffers.least_shared == SHARED_COLUMNS
    monkeypatch.setattr(LlamaModel, "forward", forgetful)
    core = core_of(CONFIGS["llama"])

    assert core.packs
    assert core.buffers.least_shared > 10**9


def test_equal_rows_are_not_packed(monkeypatch):
    core = core_of(CONFIGS["llama"])
    passes = shapes_of_passes(core, monkeypatch)

    core.prefill([(None, 0, tokens(30, 1)), (None, 0, tokens(30, 2))])

    assert passes == [(2, 30)]


def test_models_with_a_window_pad_their_rows():
    core = core_of(MistralConfig(**SIZES, sliding_window=8))

    assert not core.packs
    assert not core.fit_together([1, 200])


def test_a_model_that_does_not_hand_segments_on_pads_its_rows(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaModel

    inner = LlamaModel.forward

    def forgetful(self, *args, segments=None, **given):
        return inner(self, *args, **given)

    monkeypatch.setattr(LlamaModel, "forward", forgetful)
    core = core_of(CONFIGS["llama"])

    assert not core.packs
    assert core.prefill([(None, 0, tokens(3, 1)), (None, 0, tokens(90, 2))]).shape == (2, 300)


def test_packing_pays_where_much_is_padded_and_products_are_large():
    torch.manual_seed(0)
    large = AutoModelForCausalLM.from_config(
        LlamaConfig(**SIZES | {"hidden_size": 256, "intermediate_size": 2048})
    )
    cost = PaddingCost(large, 2)

    assert cost.packing_pays([100, 300])
    assert not cost.packing_pays([300, 300])
    assert not cost.packing_pays([299, 300])
