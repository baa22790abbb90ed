"""An optimiser in main memory: the same steps, states that are where they should be, and checkpoints both ways."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import MasterOptimizer
from helpers.training import group, tiny, trainer_of

BATCHES = [[group(str(step), [0.0, 1.0, 0.5])] for step in range(4)]


def trainer(*, offload: bool, dtype: torch.dtype = torch.float64, **options):
    model = tiny(dtype=dtype, vocab_size=320)
    return trainer_of(model, optimizer_offload=offload, learning_rate=1e-2, weight_decay=0.1, **options)


def weights(trained) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in trained.model.parameters()])


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 0)]
)
def test_steps_are_the_same_as_on_the_device(dtype, most):
    ours, plain = (trainer(offload=offload, dtype=dtype) for offload in (True, False))

    for batch in BATCHES[:3]:
        norms = [one.step(batch)["grad_norm"] for one in (ours, plain)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-12 if dtype == torch.float64 else 1e-5)

    # A weight of bfloat16 that lies between two roundings may be rounded to the other one.
    changed = (weights(ours) != weights(plain)).float().mean()
    assert (weights(ours) - weights(plain)).norm() <= most * weights(plain).norm() or changed < 1e-3
    start = weights(trainer(offload=False, dtype=dtype))
    assert not torch.equal(weights(ours), start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_and_moments_are_in_main_memory_and_gradients_on_the_device(monkeypatch, dtype):
    """On a device that is pretended: its tensors have no numbers, and nothing is copied to it."""
    monkeypatch.setattr(MasterOptimizer, "write_back", lambda _: None)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: 1.0)
    with FakeTensorMode():
        parameters = [
            torch.nn.Parameter(torch.empty(shape, device="cuda", dtype=dtype)) for shape in ((4, 3), 5)
        ]
        optimizer = MasterOptimizer(parameters, GRPOConfig(optimizer_offload=True))
        assert {one.device.type for one in optimizer.masters} == {"cpu"}
        assert {one.device.type for one in optimizer.sums} == {"cuda"}
        assert {one.dtype for one in (*optimizer.masters, *optimizer.sums)} == {torch.float32}
        for total in optimizer.sums:
            total.grad = torch.empty(total.shape, device="cuda")

        optimizer.step(1e-3)

        states = [one for state in optimizer.inner.state.values() for one in state.values()]
        assert len(states) == 2 * 3
        assert {one.device.type for one in states} == {"cpu"}
        assert all(one.grad is None for one in (*optimizer.masters, *optimizer.sums))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False)])
def test_a_checkpoint_is_resumed_with_and_without_offload(tmp_path, before, after, dtype):
    whole, first = (trainer(offload=before, dtype=dtype) for _ in range(2))
    for batch in BATCHES[:3]:
        whole.step(batch)
    for batch in BATCHES[:2]:
        first.step(batch)
    second = trainer(offload=after, dtype=dtype)
    second.resume(first.save(tmp_path / "half"))
    second.step(BATCHES[2])

    assert all(one["fused"] for one in second.learner.optimizer.inner.param_groups)
    if before == after:
        assert torch.equal(weights(second), weights(whole))
    most = 1e-12 if dtype == torch.float64 else 1e-4
    assert (weights(second) - weights(whole)).norm() <= most * weights(whole).norm()
