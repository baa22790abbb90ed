"""The speeds of a device that are measured before GPUs are divided, here those of the CPU."""

from __future__ import annotations

import logging

import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

from agentenv.placement import Machine, measure
from agentenv.placement.measure import measured, speeds_of

TINY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LLAMA = LlamaConfig(**TINY, intermediate_size=48)
MOE = Qwen3MoeConfig(
    **TINY, intermediate_size=48, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
)
# Queries and outputs, keys and values, and both norms of a layer.
ATTENTION = 2 * 32 * 32 + 2 * 32 * 16 + 2 * 32


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        (LLAMA, ATTENTION + 3 * 32 * 48),
        (MOE, ATTENTION + 2 * 8 + 4 * 32 + 2 * 3 * 32 * 24),  # norms of the heads, the router, two experts
    ],
    ids=["llama", "moe"],
)
def test_a_pass_has_the_operations_of_one_layer(config, layer, monkeypatch):
    monkeypatch.setattr(measure, "COPIED_BYTES", 1000)
    seconds = iter([0.5, 0.25])

    def least(run, device):
        run()  # the real passes must work
        return next(seconds)

    monkeypatch.setattr(measure, "_least_seconds", least)
    found = speeds_of(config, 10, "cpu")

    # Two operations for each weight; each of ten tokens attends to five on average, in two products.
    forward = 10 * (2 * layer + 2 * 2 * 32 * 5)
    assert found.products_per_s == pytest.approx(3 * forward / 0.5)
    assert found.bytes_per_s == 2 * 1000 / 0.25


@pytest.mark.slow
def test_another_process_measures_this_machine(tmp_path):
    LLAMA.save_pretrained(tmp_path)

    machine = measured(Machine(2, 80), str(tmp_path), 64, "cpu")

    assert machine.measured is not None
    assert min(machine.measured.products_per_s, machine.measured.bytes_per_s) > 1e6
    assert machine.products_per_s == machine.measured.products_per_s


def test_what_cannot_be_measured_is_taken_from_the_kind_of_device(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(measure.sys, "executable", str(tmp_path / "no-python"))

    with caplog.at_level(logging.WARNING):
        machine = measured(Machine(2, 80), "model", 64, "cuda")

    assert machine == Machine(2, 80)
    assert machine.products_per_s == pytest.approx(0.4 * 989e12)
    assert "was not measured" in caplog.text
    assert "no-python" in caplog.text
