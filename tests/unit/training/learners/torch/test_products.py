"""Products through oneDNN are those of torch's own library, up to rounding, and so are their gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from agentenv.training.learners.torch import lean as products
from agentenv.training.learners.torch.logprob import chunked_logprobs, plain_logprobs

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN"
)


@pytest.fixture
def used(monkeypatch) -> list[torch.Size]:
    """Prefer oneDNN for products of every size; the list gets the shape of each left matrix."""
    shapes: list[torch.Size] = []
    inner = products.onednn_linear

    def watched(left, right, bias=None):
        shapes.append(left.shape)
        return inner(left, right, bias)

    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    monkeypatch.setattr(products, "SMALLEST", 0)
    monkeypatch.setattr(products, "onednn_linear", watched)
    return shapes


def layer(*, bias: bool = False, transposed: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(24, 40, bias=bias)
    if transposed:
        made.weight.data = made.weight.data.t().contiguous().t()
    return made


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24)])
def test_a_layer_and_its_gradients_agree_with_float64(used, shape, bias, transposed):
    made = layer(bias=bias, transposed=transposed)
    wide = copy.deepcopy(made).double()
    products.faster_linear(made)
    inputs = torch.randn(shape, requires_grad=True)
    wide_inputs = inputs.detach().double().requires_grad_()
    factors = torch.randn(*shape[:-1], 40)

    output, truth = made(inputs), wide(wide_inputs)
    (output * factors).sum().backward()
    (truth * factors).sum().backward()

    assert len(used) == 3
    torch.testing.assert_close(output.double(), truth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs.grad.double(), wide_inputs.grad, rtol=1e-5, atol=1e-5)
    for ours, right in zip(made.parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), right.grad, rtol=1e-5, atol=1e-5)
        assert ours.grad.stride() == ours.stride()


def test_a_frozen_weight_gets_no_gradient(used):
    made = layer().requires_grad_(requires_grad=False)
    products.faster_linear(made)
    inputs = torch.randn(3, 24, requires_grad=True)

    made(inputs).sum().backward()

    assert made.weight.grad is None
    assert len(used) == 2


def test_gradients_can_be_differentiated_again(used):
    made = layer()
    products.faster_linear(made)
    inputs = torch.randn(3, 24, requires_grad=True)

    (gradient,) = torch.autograd.grad(made(inputs).square().sum(), inputs, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), inputs)

    truth = 2 * torch.ones(3, 24) @ made.weight.T @ made.weight
    torch.testing.assert_close(second, truth, rtol=1e-4, atol=1e-4)


def test_without_gradients_a_layer_computes_one_product(used):
    made = layer()
    products.faster_linear(made)

    with torch.no_grad():
        output = made(inputs := torch.randn(3, 24))

    assert len(used) == 1
    torch.testing.assert_close(output, linear(inputs, made.weight), rtol=1e-5, atol=1e-5)


def test_a_copy_of_a_layer_uses_its_own_weights(used):
    made = layer()
    products.faster_linear(made)
    copied = copy.deepcopy(made)
    copied.weight.data.zero_()

    with torch.no_grad():
        output = copied(torch.randn(3, 24))

    assert not output.any()
    assert len(used) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_formats_use_torchs_own_products(used, dtype):
    made = layer()
    products.faster_linear(made)
    inputs = torch.randn(3, 24, dtype=dtype)

    with torch.no_grad():
        output = made.to(dtype)(inputs)

    assert not used
    assert torch.equal(output, linear(inputs, made.weight))


def test_small_products_use_torchs_own(used, monkeypatch):
    monkeypatch.setattr(products, "SMALLEST", 3 * 24 * 40 + 1)
    made = layer()
    products.faster_linear(made)

    made(torch.randn(3, 24)).sum().backward()

    assert not used


def test_other_processors_keep_their_layers(monkeypatch):
    monkeypatch.setattr(products, "prefers_onednn", lambda: False)
    made = layer()

    products.faster_linear(made)

    assert "forward" not in vars(made)


def test_under_autocast_a_layer_computes_in_the_lower_precision(used):
    made = layer()
    products.faster_linear(made)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = made(torch.randn(3, 24))

    assert not used
    assert output.dtype == torch.bfloat16


@pytest.mark.parametrize(("block", "calls"), [(40, 9), (16, 21)])
def test_logprobs_of_the_head_and_their_gradients_agree_with_the_plain_ones(used, block, calls, monkeypatch):
    monkeypatch.setattr(products, "BLOCK", block)
    torch.manual_seed(0)
    hidden = torch.randn(9, 24, requires_grad=True)
    weight = torch.randn(40, 24, requires_grad=True)
    labels = torch.randint(0, 40, (9,))
    logprobs, entropy = chunked_logprobs(hidden, weight, labels, chunk=4)
    ours = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))

    plain_lp, plain_h = plain_logprobs(hidden @ weight.T, labels)
    plain = torch.autograd.grad(plain_lp.sum() + plain_h.sum(), (hidden, weight))

    assert len(used) == calls
    torch.testing.assert_close(logprobs, plain_lp, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
