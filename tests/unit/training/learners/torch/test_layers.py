"""Compiled layers compute what plain ones do, in the trainer's passes only, and are left out where they fail."""

from __future__ import annotations

import shutil

import pytest
import torch

from agentenv.core import UsageError
from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import Policy, layers, pack_rows
from agentenv.training.learners.torch import flex as flex_module
from agentenv.training.learners.torch.check import difference, probe_gradients, probe_rows
from agentenv.training.learners.torch.packing import pad_rows
from helpers.training import group, tiny, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


PADDED = "rows are padded, not packed: compiled layers would be compiled anew for each pack"
"""What the check says on the CPU."""


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """Trace layers as the compiler does, without writing code for them."""
    import torch._dynamo

    torch._dynamo.reset()
    monkeypatch.setattr(layers, "BACKEND", "aot_eager")
    yield
    torch._dynamo.reset()


def policy_of(**options) -> Policy:
    return Policy(tiny(dtype=torch.float32), GRPOConfig(dtype="float32", **options))


def runs(monkeypatch) -> list[bool]:
    """Return a list that gets, for each call of a layer, whether it ran compiled."""
    seen: list[bool] = []
    inner = layers._Run._run

    def watched(self, *args, **kwargs):
        seen.append(self._owner.used)
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(layers._Run, "_run", watched)
    return seen


def same_gradients(policy: Policy, truth: Policy, micro) -> bool:
    return difference(probe_gradients(policy, micro), probe_gradients(truth, micro)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_plain_layers(checkpointing, monkeypatch):
    seen = runs(monkeypatch)
    policy = policy_of(torch_compile=True, gradient_checkpointing=checkpointing)
    assert policy.check() == [PADDED]
    seen.clear()

    for rows in (probe_rows(61), probe_rows(61, groups=1, length=9)):
        assert same_gradients(policy, policy_of(), pad_rows(rows))
    assert len(seen) == (8 if checkpointing else 4)
    assert all(seen)


@pytest.mark.exhaustive
def test_packs_of_flex_attention_are_attended_over_outside_of_the_layers(monkeypatch):
    from torch.nn.attention import flex_attention as torch_flex

    reference = torch.compile(torch_flex.flex_attention, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_module, "_kernel", lambda device: reference)
    policy = policy_of(torch_compile=True)
    policy.way, policy.pack_reason = "flex", ""
    assert policy.check() == []
    versions = torch._dynamo.utils.counters["stats"]["unique_graphs"]

    for length in (3, 9, 30):
        assert same_gradients(policy, policy_of(), pack_rows(probe_rows(61, length=length)))

    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - versions <= 4


@pytest.mark.slow
def test_only_passes_of_the_trainer_run_compiled(monkeypatch):
    seen = runs(monkeypatch)
    policy = policy_of(torch_compile=True)
    micro = pad_rows(probe_rows(61))

    with torch.no_grad():
        policy.score(micro)
        scored = list(seen)
        policy.model(torch.arange(7)[None])

    assert scored == [True, True]
    assert seen == [True, True, False, False]


@pytest.mark.parametrize("fault", ["raises", "differs"])
def test_layers_that_cannot_be_compiled_exactly_run_as_they_are(fault, monkeypatch):
    def compile_badly(call, **_):
        def run(*args, **kwargs):
            if fault == "raises":
                raise RuntimeError("no compiler\nat all")
            output = call(*args, **kwargs)
            return output * 1.01

        return run

    monkeypatch.setattr(torch, "compile", compile_badly)
    policy = policy_of(torch_compile=True)

    finding, padded = policy.check()

    assert padded == PADDED
    assert finding.startswith("layers are not compiled: ")
    assert ("RuntimeError: no compiler" in finding) == (fault == "raises")
    assert same_gradients(policy, policy_of(), pad_rows(probe_rows(61)))
    assert not policy.copy().layers.allowed


@pytest.mark.exhaustive
def test_a_training_step_moves_the_weights_as_without_it():
    groups = [group(str(number), [0.0, 1.0, 0.3]) for number in range(2)]
    weights = []
    for given in (False, True):
        one = trainer_of(model=tiny(dtype=torch.float32), torch_compile=given, learning_rate=1e-2)
        one.step(groups)
        one.step(groups)
        weights.append(torch.cat([part.detach().flatten() for part in one.model.parameters()]))

    assert torch.allclose(*weights, atol=1e-4)
    assert not torch.allclose(
        weights[0], torch.cat([part.flatten() for part in tiny(dtype=torch.float32).parameters()]), atol=1e-3
    )


@pytest.mark.parametrize("option", [{"router_replay": True}, {"router_aux_loss_coef": 0.1}])
def test_routers_cannot_be_watched_in_compiled_layers(option):
    with pytest.raises(UsageError, match="torch_compile=True cannot be combined with router_"):
        GRPOConfig(torch_compile=True, **option)


@pytest.mark.exhaustive
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="PyTorch compiles for the CPU with g++, which is not installed"
)
def test_the_code_that_the_compiler_writes_is_exact(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(layers, "BACKEND", "inductor")
    policy = policy_of(torch_compile=True)

    assert policy.check() == [PADDED]
    assert same_gradients(policy, policy_of(), pad_rows(probe_rows(61, groups=1, length=9)))
