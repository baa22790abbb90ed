"""The learning rate of a training that names none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.training import GRPOConfig, LoraOptions
from agentenv.training.rate import default_learning_rate, default_rate, with_learning_rate

WIDTHS = st.integers(min_value=8, max_value=100_000)


@pytest.mark.parametrize(
    ("width", "rate"),
    [(64, 1e-5), (512, 1e-5), (576, 8.9e-6), (896, 5.7e-6), (3584, 1.4e-6), (5120, 1e-6), (8192, 1e-6)],
)
def test_the_rate_falls_with_the_width_between_its_bounds(width, rate):
    assert default_learning_rate(width, lora=False) == pytest.approx(rate)


@given(WIDTHS, WIDTHS)
def test_a_wider_model_never_takes_larger_steps_and_lora_ten_times_as_large_ones(one, other):
    narrow, wide = sorted((one, other))
    rates = [default_learning_rate(width, lora=False) for width in (narrow, wide)]

    assert 1e-5 >= rates[0] >= rates[1] >= 1e-6
    assert default_learning_rate(wide, lora=True) == pytest.approx(10 * rates[1])


@pytest.mark.parametrize(
    ("width", "lora", "rate"),
    [(576, False, 5e-5), (576, True, 5e-4), (3584, False, 8e-6), (3584, True, 8e-5), (64, False, 5.6e-5)],
)
def test_a_warm_up_follows_the_same_rule_from_a_higher_anchor(width, lora, rate):
    config = GRPOConfig(lora=LoraOptions() if lora else None, learning_rate=0.5)

    assert default_rate(config, model(width), warmup=True) == pytest.approx(rate)


def model(width: int, **more: object) -> SimpleNamespace:
    text = SimpleNamespace(hidden_size=width)
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text), **more)


def test_options_get_the_rate_of_the_model_unless_they_have_one():
    assert with_learning_rate(GRPOConfig(), model(576)).optimizer.learning_rate == 8.9e-6
    assert with_learning_rate(GRPOConfig(lora=LoraOptions()), model(576)).optimizer.learning_rate == 8.9e-5
    assert with_learning_rate(GRPOConfig(), model(576, peft_config={})).optimizer.learning_rate == 8.9e-5
    assert with_learning_rate(GRPOConfig(learning_rate=0.5), model(576)).optimizer.learning_rate == 0.5
    assert with_learning_rate(GRPOConfig(), None).optimizer.learning_rate == 1e-5
    assert GRPOConfig().base_rate == 1e-6
