"""Check 4: our losses and their gradients are those of TRL on identical tensors.

TRL's `_compute_loss` runs unbound on a namespace that stands for its trainer, with its scoring
stubbed to return our leaf tensors; so its formulas and reductions are compared, not its forward pass.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from agentenv.training import GRPOConfig, grpo_loss, token_weights
from agentenv.training.objective import loss as losses

pytestmark = pytest.mark.slow

B, T, L_MAX = 6, 17, 32

SEQUENCES = {"loss_type": "grpo", "importance_sampling_level": "sequence"}

CASES = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {},
    "dapo": {},
    "cispo": {"epsilon_high": 5.0},
    "sapo": {},
    "gspo": SEQUENCES,
    "gspo with a wide clip": SEQUENCES | {"epsilon": 0.05, "epsilon_high": 0.06},
    "dapo with k3": {"loss_type": "dapo", "beta": 0.04},
    "dapo with delta": {"loss_type": "dapo", "delta": 1.6},
    "dapo with TIS": {"loss_type": "dapo", "use_vllm": True},
    "dapo with OPSM": {"loss_type": "dapo", "off_policy_mask_threshold": 0.05},
    "grpo with unbiased k3": {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
}


@pytest.fixture(scope="module")
def trl_trainer():
    pytest.importorskip("trl", reason="TRL is not installed")
    pytest.importorskip("datasets")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import GRPOTrainer
    return GRPOTrainer


def tensors():
    generator = torch.Generator().manual_seed(7)

    def draw(scale: float) -> torch.Tensor:
        return torch.randn(B, T, generator=generator, dtype=torch.float64) * scale

    old = draw(1.0) - 2
    mask = torch.rand(B, T, generator=generator) > 0.25  # holes, as where a tool answered
    mask[:, 0] = True
    advantages = torch.tensor([1.0, -0.7, 0.3, -1.2, 0.5, -0.4], dtype=torch.float64)
    return SimpleNamespace(
        lp=old + draw(0.3), old=old, ref=old + draw(0.2), mu=old + draw(0.4), mask=mask, advantages=advantages
    )


def theirs(trainer_class, case: dict, t) -> tuple[float, torch.Tensor]:
    leaf = t.lp.clone().requires_grad_()
    # Our defaults are written out here, because TRL has one clip for tokens and sequences.
    clip = (3e-4, 4e-4) if case.get("importance_sampling_level") == "sequence" else (0.2, 0.28)
    options = {
        "loss_type": "dapo",
        "epsilon": clip[0],
        "epsilon_high": clip[1],
        "delta": None,
        "beta": 0.0,
        "use_vllm": False,
        **case,
    }
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
    )
    standin = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (leaf, leaf.detach().abs(), None),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        accelerator=accelerator,
        args=SimpleNamespace(
            delta=options["delta"],
            use_bias_correction_kl=options.get("use_bias_correction_kl", False),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=losses.SAPO_NEGATIVE,
            steps_per_generation=1,
        ),
        aux_loss_enabled=False,
        beta=options["beta"],
        current_gradient_accumulation_steps=1,
        epsilon_high=options["epsilon_high"],
        epsilon_low=options["epsilon"],
        get_off_policy_mask=trainer_class.get_off_policy_mask,
        importance_sampling_level=options.get("importance_sampling_level", "token"),
        loss_type=options["loss_type"],
        max_completion_length=L_MAX,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=options.get("off_policy_mask_threshold"),
        tools=["a tool"],
        top_entropy_quantile=1.0,
        use_vllm=options["use_vllm"],
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
    )
    inputs = {
        "prompt_ids": torch.zeros(B, 3, dtype=torch.long),
        "prompt_mask": torch.ones(B, 3, dtype=torch.long),
        "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": torch.ones(B, T, dtype=torch.long),
        "tool_mask": t.mask.long(),
        "advantages": t.advantages,
        "old_per_token_logps": t.old,
        "ref_per_token_logps": t.ref,
        "sampling_per_token_logps": t.mu,
        "importance_sampling_ratio": (t.old - t.mu).exp().clamp(max=2.0),
        "num_items_in_batch": t.mask.sum(),
    }
    loss = trainer_class._compute_loss(standin, None, inputs)
    loss.backward()
    return loss.item(), leaf.grad


def ours(case: dict, t) -> tuple[float, torch.Tensor]:
    options = {"loss_type": "dapo", "max_completion_length": L_MAX, **case}
    if options.pop("use_vllm", False):
        options |= {"importance_correction": "token_truncate", "old_logprobs": "recompute"}
    if options["loss_type"] == "bnpo":  # with one micro-batch, the batch's token mean
        options["loss_type"] = "dapo"
    config = GRPOConfig(**options)
    lengths = t.mask.sum(-1).tolist()
    weights = token_weights(lengths, reduction=config.loss.scheme, max_tokens=L_MAX)
    leaf = t.lp.clone().requires_grad_()
    output = grpo_loss(
        leaf,
        old_logprobs=t.old,
        advantages=t.advantages[:, None].expand(B, T),
        weights=torch.tensor(weights, dtype=torch.float64)[:, None].expand(B, T),
        config=config,
        loss_mask=t.mask,
        sampler_logprobs=t.mu,
        ref_logprobs=t.ref,
    )
    output.loss.backward()
    return output.loss.item(), leaf.grad


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_trls(trl_trainer, name, monkeypatch):
    # TRL rounds the temperatures to float32, which holds this one exactly and the usual 1.05 not.
    monkeypatch.setattr(losses, "SAPO_NEGATIVE", 1.0625)
    case = {"loss_type": name} | CASES[name]
    t = tensors()

    loss, gradient = ours(case, t)
    their_loss, their_gradient = theirs(trl_trainer, case, t)

    assert loss == pytest.approx(their_loss, abs=1e-14)
    torch.testing.assert_close(gradient, their_gradient, rtol=0, atol=1e-14)
    assert gradient.abs().max().item() > 0.001


@pytest.mark.parametrize(
    ("name", "learns"),
    [
        # Each side of a clip stops one sequence and lets another one pass, besides those that go back.
        ("gspo with a wide clip", [True, False, True, True, False, True]),
        ("gspo", [False, False, True, False, False, True]),
    ],
)
def test_the_compared_clips_stop_some_sequences(name, learns):
    _, gradient = ours(CASES[name], tensors())

    assert (gradient != 0).any(-1).tolist() == learns
