"""The engine's faster products give the numbers of plain ones, and leave the model as they found it."""

from __future__ import annotations

import asyncio
import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from agentenv.engine import Sampling, TransformersEngine
from agentenv.engine.hf import products
from agentenv.engine.hf.load import lay_out_for_few_rows
from agentenv.engine.hf.products import BREAK_EVEN, Products

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"), reason="this torch has no oneDNN"
)

EVEN = BREAK_EVEN[torch.float32]


@pytest.fixture(autouse=True)
def used(monkeypatch) -> list[str]:
    """Prefer oneDNN for products of every size; the list gets the layout of each weight that it was given."""
    layouts: list[str] = []
    inner = products.onednn_linear

    def watched(inputs, weight, bias):
        layouts.append("packed" if weight.is_mkldnn else "plain")
        return inner(inputs, weight, bias)

    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    monkeypatch.setattr(products, "SMALLEST", dict.fromkeys(products.SMALLEST, 0))
    monkeypatch.setattr(products, "onednn_linear", watched)
    monkeypatch.setattr(products, "free_memory", lambda: sys.maxsize)
    return layouts


def build(dtype: torch.dtype = torch.float32, *, seed: int = 0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attention_bias=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def pack(made: Products) -> None:
    for _ in range(8 * EVEN):
        made.expect(0)


@torch.no_grad()
def logits_of(model, rows: int = 3) -> torch.Tensor:
    return model(input_ids=torch.arange(7).repeat(rows, 1)).logits.float()


@pytest.mark.parametrize("laid_out", [False, True])
def test_dense_and_packed_products_agree_with_plain_ones(used, laid_out):
    model = build()
    if laid_out:
        lay_out_for_few_rows(model)
    made = Products(model)
    plain = logits_of(model)

    with made.on():
        dense = logits_of(model)
    pack(made)
    seen = len(used)
    with made.on():
        packed = logits_of(model)

    torch.testing.assert_close(dense, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed, plain, rtol=1e-4, atol=1e-4)
    assert set(used[:seen]) == {"plain"}
    # Of the input-major layers nothing is packed; the head is tied to the embeddings, and not input-major.
    assert used[seen:].count("packed") == (1 if laid_out else 15)


def packs_bfloat16() -> bool:
    """Return whether oneDNN packs weights in bfloat16 here; `prefers_onednn` asks for more than that."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(32, 32, dtype=torch.bfloat16), 16)
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(not packs_bfloat16(), reason="this processor has no AVX-512")
def test_in_bfloat16_only_packed_weights_are_used(used):
    model = build(torch.bfloat16)
    made = Products(model)
    plain = logits_of(model)

    with made.on():
        before = logits_of(model)
    for _ in range(4 * BREAK_EVEN[torch.bfloat16]):
        made.expect(0)
    with made.on():
        packed = logits_of(model)

    assert torch.equal(before, plain)
    assert used == ["packed"] * 15
    torch.testing.assert_close(packed, plain, rtol=0.05, atol=0.05 * float(plain.std()))


def test_the_model_is_left_as_it_was():
    model = build()
    first, *others = (module for module in model.modules() if type(module) is nn.Linear)
    own = first.__dict__["forward"] = lambda inputs: nn.Linear.forward(first, inputs)
    made = Products(model)

    with made.on():
        assert all(module.__dict__["forward"] is not own for module in [first, *others])

    assert first.__dict__["forward"] is own
    assert all("forward" not in module.__dict__ for module in others)


@pytest.mark.parametrize("order", ["first in, first out", "last in, first out"])
def test_two_engines_of_one_model_leave_it_as_it_was(order):
    model = build()
    plain = logits_of(model)
    ways = [made.on() for made in (Products(model), Products(model))]

    for way in ways:
        way.__enter__()
    both = logits_of(model)
    for way in ways if order.startswith("first") else reversed(ways):
        way.__exit__(None, None, None)

    torch.testing.assert_close(both, plain, rtol=1e-4, atol=1e-4)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_weight_that_changes_unannounced_is_not_used_from_its_copy(used):
    model = build()
    made = Products(model)
    pack(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)

    with made.on():
        logits = logits_of(model)

    assert "packed" not in used
    torch.testing.assert_close(logits, logits_of(model), rtol=1e-4, atol=1e-4)


def test_another_thread_can_train_meanwhile(used):
    model = build()
    made = Products(model)
    pack(made)

    with made.on():
        model(input_ids=torch.arange(7)[None]).logits.sum().backward()

    assert not used
    assert all(parameter.grad is not None for parameter in model.parameters())


def passes_until_packed(made: Products, left: int, most: int = 1000) -> int | None:
    """Return after how many decoding passes the weights were packed, with `left` tokens to go at first."""
    for done in range(most):
        made.expect(max(left - done, 0))
        if any(layer.packed is not None for layer in made._layers):
            return done + 1
    return None


@pytest.mark.parametrize(
    ("left", "most", "after"),
    [
        (EVEN, EVEN, None),  # a short rollout does not pack
        (1000, 1000, EVEN + 1),  # a long one packs once the passes so far would have paid for it
        (2 * EVEN, 2 * EVEN, None),  # this one ends too soon after that
        (0, 1000, 4 * EVEN),  # many short ones with the same weights
    ],
)
def test_packing_waits_until_it_pays(left, most, after):
    assert passes_until_packed(Products(build()), left, most) == after


@pytest.mark.parametrize(("before", "after"), [(2 * EVEN + 1, 1), (EVEN, None)])
def test_a_rollout_is_expected_to_be_as_long_as_the_last_one(before, after):
    made = Products(build())
    for _ in range(before):
        made.expect(0)
    made.forget()
    made.forget()

    assert passes_until_packed(made, EVEN, EVEN) == after


def test_without_memory_for_a_copy_nothing_is_packed(monkeypatch):
    monkeypatch.setattr(products, "free_memory", lambda: 1000)

    assert passes_until_packed(Products(build()), 10_000) is None


def test_other_processors_are_left_alone(monkeypatch):
    monkeypatch.setattr(products, "prefers_onednn", lambda: False)
    model = build()
    made = Products(model)

    made.expect(1000)
    with made.on():
        assert all("forward" not in module.__dict__ for module in model.modules())


def test_an_engine_packs_anew_after_an_update(used):
    model, fresh = build(), build(seed=1)
    engine = TransformersEngine(model)

    async def sample() -> tuple[float, int]:
        prompt, sampling = [5, 6, 7], Sampling(max_tokens=10 * EVEN, seed=3)
        done = await engine.generate(prompt, sampling, stop_token_ids=())
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *done.token_ids]])).logits
        truth = logits[0, 2:-1].log_softmax(-1)
        expected = truth.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        return float((expected - torch.tensor(done.logprobs)).abs().max()), used.count("packed")

    error, packed = asyncio.run(sample())
    with engine.updating():
        model.load_state_dict(fresh.state_dict())
    error_after, packed_after = asyncio.run(sample())
    engine.shutdown()

    assert error < 1e-4
    assert error_after < 1e-4
    assert packed_after > packed > 0
