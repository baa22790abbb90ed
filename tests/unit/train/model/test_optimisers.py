"""Optimisers by import string: they train, keep their own state, and resume to the bit."""

from __future__ import annotations

import math

import pytest
import torch

from agentenv.core import UsageError
from agentenv.train import GRPOConfig
from agentenv.train.model import MasterOptimizer
from helpers.training import group, tiny, trainer_of


def trained_and_resumed(tmp_path, **options):
    """Train three steps, and again with a stop after the second; return both trainers."""
    batches = [[group(str(step), [0.0, 1.0, 0.5])] for step in range(3)]

    def make():
        return trainer_of(tiny(dtype=torch.float32, vocab_size=320), **options)

    whole, first, second = make(), make(), make()
    for batch in batches:
        whole.step(batch)
    for batch in batches[:2]:
        first.step(batch)
    second.resume(first.save(tmp_path / "half"))
    second.step(batches[2])
    return whole, second


@pytest.mark.parametrize("optim", ["adamw", "torch.optim:NAdam", "torch.optim:RAdam"])
def test_an_optimiser_resumes_to_the_bit(tmp_path, optim):
    whole, resumed = trained_and_resumed(tmp_path, optim=optim)
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_8_bit_optimiser_keeps_8_bits_and_resumes_to_the_bit(tmp_path):
    pytest.importorskip("torchao", reason="torchao is not installed")
    with torch.compiler.set_stance("force_eager"):
        whole, resumed = trained_and_resumed(tmp_path, optim="torchao.optim:AdamW8bit")

    states = whole.learner.optimizer.inner.state.values()
    assert any(type(one).__name__ == "OptimState8bit" for state in states for one in state.values())
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))
    untrained = tiny(dtype=torch.float32, vocab_size=320)
    assert not all(map(torch.equal, whole.model.parameters(), untrained.parameters()))


@pytest.mark.parametrize("optim", ["adam", "torch.optim:Nothing", "no_such_package:Adam"])
def test_an_optimiser_that_cannot_be_loaded_is_named(optim):
    with pytest.raises(UsageError, match=optim):
        MasterOptimizer([torch.nn.Parameter(torch.ones(2))], GRPOConfig(optim=optim))


@pytest.mark.parametrize(("gradient", "clipped"), [((3.0, 4.0), (1.5, 2.0)), ((0.3, 0.4), (0.3, 0.4))])
def test_gradients_are_clipped_to_the_norm_of_the_run(gradient, clipped):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in gradient]
    optimizer = MasterOptimizer(parameters, GRPOConfig(max_grad_norm=2.5, adam_epsilon=1.0))
    for parameter, value in zip(parameters, gradient, strict=True):
        parameter.grad = torch.tensor([value])

    norm = optimizer.step(0.1)

    assert norm == pytest.approx(math.hypot(*gradient))
    # Adam's first step is g / (|g| + epsilon): with an epsilon of 1 it shows how large g was.
    expected = [-0.1 * g / (g + 1) for g in clipped]
    assert [one.item() for one in parameters] == pytest.approx(expected, rel=1e-5)
