"""Optimisers by import string: they train, keep their own state, and resume to the bit."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GPT2Config, GPT2LMHeadModel

from agentenv.core import UsageError
from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import MasterOptimizer
from agentenv.training.learners.torch.optim import kernel_of
from helpers.training import group, tiny, trainer_of


def trained_and_resumed(tmp_path, **options):
    """Train three steps, and again with a stop after the second; return both trainers."""
    batches = [[group(str(step), [0.0, 1.0, 0.5])] for step in range(3)]

    def make():
        return trainer_of(tiny(dtype=torch.float32, vocab_size=320), weight_decay=0.1, **options)

    whole, first, second = make(), make(), make()
    for batch in batches:
        whole.step(batch)
    for batch in batches[:2]:
        first.step(batch)
    second.resume(first.save(tmp_path / "half"))
    second.step(batches[2])
    return whole, second


@pytest.mark.parametrize(
    ("devices", "kernel"),
    [({"cpu"}, "fused"), ({"cuda"}, "fused"), ({"mps"}, "foreach"), ({"cpu", "cuda"}, "foreach")],
)
def test_adamw_reads_and_writes_each_weight_once_where_its_kernel_can(devices, kernel):
    assert kernel_of(devices) == kernel


@pytest.mark.parametrize("optim", ["adamw", "torch.optim:NAdam", "torch.optim:RAdam"])
def test_an_optimiser_resumes_to_the_bit(tmp_path, optim):
    whole, resumed = trained_and_resumed(tmp_path, optim=optim)
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))


def test_a_resumed_optimiser_has_the_options_of_its_own_run(tmp_path):
    batch = [group("a", [0.0, 1.0, 0.5])]
    first = trainer_of(adam_beta1=0.5, weight_decay=0.5, adam_epsilon=1e-3)
    first.step(batch)
    second = trainer_of(adam_beta1=0.8, adam_beta2=0.9, weight_decay=0.1)

    second.resume(first.save(tmp_path / "step"))

    inner = second.learner.optimizer.inner
    assert [(held["betas"], held["eps"], held["weight_decay"]) for held in inner.param_groups] == [
        ((0.8, 0.9), 1e-8, 0.1),
        ((0.8, 0.9), 1e-8, 0.0),
    ]
    assert all(state["step"] == 1 for state in inner.state.values()), (
        "what it had learnt of the gradients stays"
    )


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
    with pytest.raises(UsageError, match="nothing to train"):
        MasterOptimizer([torch.ones(1)], GRPOConfig())


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


def test_matrices_decay_and_norms_and_biases_do_not():
    """Against torch's own AdamW, with the two kinds told apart by hand."""
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    torch.manual_seed(0)
    ours = GPT2LMHeadModel(config).double().eval()
    truth = copy.deepcopy(ours)
    kinds = {name: name.endswith("weight") and ".ln_" not in name for name, _ in truth.named_parameters()}
    assert {name.rsplit(".", 1)[0][-4:] for name, matrix in kinds.items() if not matrix} >= {"ln_1", "ln_f"}
    settings = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}
    named = dict(truth.named_parameters())
    reference = torch.optim.AdamW(
        [
            {"params": [named[name] for name in kinds if kinds[name]], "weight_decay": 0.3},
            {"params": [named[name] for name in kinds if not kinds[name]], "weight_decay": 0.0},
        ],
        **settings,
    )
    optimizer = MasterOptimizer(ours.named_parameters(), GRPOConfig(weight_decay=0.3, max_grad_norm=1e9))

    ids = torch.arange(20)[None]
    for _ in range(3):
        for model in (ours, truth):
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step(0.01)
        reference.step()
        reference.zero_grad()

    for name, one in ours.named_parameters():
        torch.testing.assert_close(one, named[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "shape", "decayed"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (4, 4), True),
        ("model.embed_tokens.weight", (4, 4), True),
        ("base_model.model.layers.0.q_proj.lora_A.default.weight", (4, 4), True),
        ("model.layers.0.mlp.experts.gate_up_proj", (2, 4, 4), True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (2, 4), False),
        ("model.layers.0.self_attn.q_norm.weight", (2, 4), False),
        ("model.norm.weight", (4,), False),
        ("transformer.ln_f.weight", (4,), False),
        ("", (4,), False),
        ("", (4, 4), True),
    ],
)
def test_which_parameters_decay(name, shape, decayed):
    parameter = torch.nn.Parameter(torch.ones(shape))
    optimizer = MasterOptimizer([(name, parameter)], GRPOConfig(weight_decay=0.1))
    (only,) = optimizer.inner.param_groups
    assert only["weight_decay"] == (0.1 if decayed else 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_gradients_that_lie_in_memory_in_other_ways_are_stepped_right(dtype):
    generator = torch.Generator().manual_seed(0)
    weight, grads = (torch.randn(8, 6, generator=generator) for _ in range(2))
    ours = torch.nn.Parameter(weight.to(dtype).t().contiguous().t())  # input-major
    optimizer = MasterOptimizer([ours], GRPOConfig(learning_rate=0.1, max_grad_norm=1e9))
    truth = torch.nn.Parameter(weight.to(dtype).float())
    reference = torch.optim.AdamW([truth], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0, foreach=False)
    for factor in (1.0, -0.5, 2.0):
        (ours * (grads * factor).to(dtype)).sum().backward()
        total = optimizer.sums[0]
        total.grad = total.grad.contiguous()  # as a product of matrices may return it
        truth.grad = (grads * factor).to(dtype).float()
        optimizer.step(0.1)
        reference.step()

    assert optimizer.inner.param_groups[0]["fused"]
    torch.testing.assert_close(optimizer.masters[0].detach(), truth.detach(), rtol=0, atol=1e-5)


def test_the_state_of_another_model_is_refused():
    square, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    saved = MasterOptimizer([square, square.detach().clone().requires_grad_()], GRPOConfig()).state_dict()

    with pytest.raises(UsageError, match=r"groups of \[2\] parameters .* the model have \[1, 1\]"):
        MasterOptimizer([square, vector], GRPOConfig()).load_state_dict(saved)


def small_steps(optimizer, parameter, number):
    for _ in range(number):
        parameter.grad = None
        parameter.sum().backward()
        optimizer.step(1e-5)


def test_what_rounding_took_from_a_weight_is_kept_by_the_next_optimiser():
    parameter = torch.nn.Parameter(torch.full((4,), 0.1, dtype=torch.bfloat16))
    before = parameter.detach().clone()
    first = MasterOptimizer([parameter], GRPOConfig())
    small_steps(first, parameter, 20)
    first.close()
    assert torch.equal(parameter, before)  # 20 updates of 1e-5 are less than half a step of bfloat16

    second = MasterOptimizer([parameter], GRPOConfig(), {parameter: first.masters[0]})
    small_steps(second, parameter, 20)

    assert (parameter < before).all()


def test_a_weight_that_was_changed_since_begins_with_a_new_master():
    parameter = torch.nn.Parameter(torch.tensor([0.1, 0.1], dtype=torch.bfloat16))
    first = MasterOptimizer([parameter], GRPOConfig())
    small_steps(first, parameter, 5)
    first.close()
    with torch.no_grad():
        parameter[0] = 0.5

    second = MasterOptimizer([parameter], GRPOConfig(), {parameter: first.masters[0]})

    assert second.masters[0][0] == 0.5
    assert second.masters[0][1] < parameter[1].float()


@pytest.mark.parametrize("offload", [False, True])
def test_a_warm_up_in_bfloat16_hands_its_masters_to_the_updates(offload):
    trainer = trainer_of(tiny(dtype=torch.bfloat16, vocab_size=320), optimizer_offload=offload)

    trainer.warmup(list(group("shown", [1.0, 1.0])), steps=2, learning_rate=1e-3)

    optimizer = trainer.learner.optimizer
    pairs = list(zip(optimizer.parameters, optimizer.masters, strict=True))
    assert all(torch.equal(master.to(weight.dtype), weight) for weight, master in pairs)
    assert any(not torch.equal(master, weight.float()) for weight, master in pairs)
    assert trainer.learner.optimizer is optimizer


# An optimiser in main memory: the same steps, states that are where they should be, and checkpoints both ways


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


def test_masters_are_copies_also_of_wide_parameters():
    optimizer = trainer(offload=True, dtype=torch.float32).learner.optimizer

    for parameter, master in zip(optimizer.parameters, optimizer.masters, strict=True):
        assert master.data_ptr() != parameter.data_ptr()
        assert torch.equal(master, parameter)


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


def test_what_carries_the_sums_of_gradients_takes_no_memory():
    parameters = [torch.nn.Parameter(torch.ones(64, 32, dtype=torch.bfloat16))]
    optimizer = MasterOptimizer(parameters, GRPOConfig(optimizer_offload=True))

    assert optimizer.sums[0].untyped_storage().nbytes() == 4
    for _ in range(3):
        (parameters[0] * 0.001).sum().backward()
    assert torch.equal(optimizer.gradients()[0], 3 * torch.full((64, 32), 0.001).bfloat16().float())


def test_matrices_that_are_stored_input_major_are_stepped_as_they_are():
    torch.manual_seed(0)
    start, gradients = torch.randn(6, 4), torch.randn(3, 6, 4)
    found = []
    for offload in (False, True):
        parameter = torch.nn.Parameter(start.clone().t().contiguous().t())
        optimizer = MasterOptimizer([parameter], GRPOConfig(optimizer_offload=offload))
        for gradient in gradients:
            parameter.grad = gradient.t().contiguous().t()
            optimizer.step(0.1)
        found.append((parameter.detach().clone(), optimizer.state_dict()))
    resumed = MasterOptimizer([parameter], GRPOConfig(optimizer_offload=True))
    resumed.load_state_dict(found[0][1])
    for one in (optimizer, resumed):
        parameter.data = found[0][0].clone()
        one.load_state_dict(one.state_dict())
        parameter.grad = gradients[0].clone()
        one.step(0.1)
        found.append((parameter.detach().clone(), None))

    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-6)
    torch.testing.assert_close(found[3][0], found[2][0], rtol=0, atol=1e-6)


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
