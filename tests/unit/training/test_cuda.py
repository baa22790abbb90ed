"""What only a GPU can show: packing, scoring, sampling and whole steps with the kernels of the device.

`make gpu` runs these, in this order: those that compile flex attention, and most versions of it, come last.
`AGENTENV_TEST_DEVICE=cpu` runs those that make sense there on the CPU.
"""

from __future__ import annotations

import asyncio
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, GptOssConfig, MistralConfig

from agentenv.engine import Sampling, TransformersEngine
from agentenv.placement import Trained, model_sizes
from agentenv.render import byte_tokenizer
from agentenv.training import GRPOConfig, GRPOTrainer
from agentenv.training.learners.torch import Policy, pack_rows
from agentenv.training.learners.torch.budget import memory_of
from agentenv.training.learners.torch.packing import pad_rows
from agentenv.training.learners.torch.passes import accumulate
from agentenv.training.metrics import Meter
from agentenv.training.step import assign_weights
from helpers.moe import CHOSEN, rows_with_experts, tiny_moe
from helpers.rope import SHAPE
from helpers.training import group, make_row, tiny

DEVICE = os.environ.get("AGENTENV_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(),
        reason="there is no CUDA device; AGENTENV_TEST_DEVICE=cpu tries these tests without one",
    ),
]
cuda_only = pytest.mark.skipif(DEVICE != "cuda", reason="this is about the memory of a CUDA device")


VOCABULARY = SHAPE["vocab_size"]
SPECIAL = {
    "mistral": MistralConfig(**SHAPE, head_dim=16, sliding_window=60, max_position_embeddings=1024),
    "gemma3": Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=60, max_position_embeddings=1024),
    "gemma2": Gemma2Config(**SHAPE, head_dim=16, sliding_window=60, attn_logit_softcapping=2.0),
    "gpt-oss": GptOssConfig(
        **SHAPE,
        head_dim=16,
        sliding_window=60,
        num_local_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=1024,
    ),
}


def special(name: str):
    torch.manual_seed(0)
    attention = "eager" if name in {"gemma2", "gpt-oss"} else "sdpa"
    return AutoModelForCausalLM.from_config(SPECIAL[name], attn_implementation=attention).eval()


def trainer_on(device: str, dtype: torch.dtype, **options) -> GRPOTrainer:
    name = str(dtype).removeprefix("torch.")
    model = tiny(dtype=dtype, vocab_size=300, hidden_size=64).to(device)
    return GRPOTrainer(GRPOConfig(dtype=name, device=device, learning_rate=1e-3, **options), model=model)


def gradient(trainer: GRPOTrainer) -> torch.Tensor:
    shared = list(range(20))
    rows = [make_row([*shared, *range(30 + n, 50 + 2 * n)], [20, 25, 30 + n], group=n // 3) for n in range(9)]
    rows = assign_weights(rows, trainer.config)
    accumulate(trainer.learner.policy, rows, Meter())
    return torch.cat([one.grad.flatten() for one in trainer.learner.optimizer.masters]).cpu()


def test_the_transformers_engine_reports_the_logprobs_of_a_fresh_pass():
    model = tiny(dtype=torch.float32, vocab_size=byte_tokenizer().vocab_size).to(DEVICE)
    engine = TransformersEngine(model, byte_tokenizer())
    prompts = [[5 + n, 9, 14, 20 + 3 * n, *range(n)] for n in range(8)]

    async def sample():
        asked = (
            engine.generate(one, Sampling(max_tokens=12, seed=n), stop_token_ids=())
            for n, one in enumerate(prompts)
        )
        return await asyncio.gather(*asked)

    for prompt, done in zip(prompts, asyncio.run(sample()), strict=True):
        ids = torch.tensor([[*prompt, *done.token_ids]], device=DEVICE)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        want = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        assert (want - torch.tensor(done.logprobs)).abs().max() <= 5e-5
    engine.shutdown()


def test_the_engine_tells_the_experts_of_a_fresh_pass():
    model = tiny_moe(dtype=torch.float32).to(DEVICE)
    engine = TransformersEngine(model, return_routed_experts=True)
    prompt = list(range(5, 30))
    done = asyncio.run(engine.generate(prompt, Sampling(max_tokens=8, seed=0), stop_token_ids=()))
    engine.shutdown()

    ids = torch.tensor([[*prompt, *done.token_ids[:-1]]], device=DEVICE)
    with torch.no_grad():
        logits = torch.stack(model(input_ids=ids, output_router_logits=True).router_logits, 1)
    told = torch.from_numpy(done.routed_experts.array().astype("int64")).to(DEVICE)
    # Nearly equal experts may change places, so the logits of the told ones are compared.
    best = logits.topk(CHOSEN).values.sum(-1)
    assert (best - logits.gather(-1, told).sum(-1)).max() <= 1e-3


def planned_bytes(model, config, tokens):
    total = memory_of(torch.device("cuda"))
    parts = Trained(model_sizes(model.config.to_dict()), config, tokens).trainer(1, total).parts
    return parts["gradients"] + parts["activations"]


def packed_rows(length: int, members: int = 6):
    """Return rows of one group, half of whose tokens are the prompt."""
    draw = torch.Generator().manual_seed(length)
    ids = torch.randint(1, VOCABULARY, (length * (members + 1),), generator=draw).tolist()
    rows = [[*ids[:length], member, *ids[length * (member + 1) :][:length]] for member in range(members)]
    return [make_row(row, list(range(length + 1, len(row), 7))) for row in rows]


def gradient_of(model, micro) -> torch.Tensor:
    policy = Policy(model, GRPOConfig())
    assert policy.packable, policy.pack_reason
    model.zero_grad()
    policy.score(micro)[0].sum().backward()
    return torch.cat([one.grad.flatten().float() for one in model.parameters() if one.grad is not None])


@pytest.mark.parametrize("packing", ["padded", "shared"])
def test_the_gradient_is_that_of_the_cpu_in_float64(packing):
    truth = gradient(trainer_on("cpu", torch.float64, packing="padded"))
    ours = gradient(trainer_on(DEVICE, torch.float64, packing=packing))

    assert (ours - truth).norm() <= 1e-6 * truth.norm()  # Llama's norm computes in float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_at_the_start_finds_packing_and_chunks_exact(dtype):
    policy = trainer_on(DEVICE, dtype).learner.policy

    assert policy.packable, policy.pack_reason
    assert policy.head_way == "matrix"


@cuda_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packs_take_flex_attention(dtype):
    policy = trainer_on(DEVICE, dtype).learner.policy
    assert policy.packable, policy.pack_reason
    assert policy.way == "flex"


@pytest.mark.parametrize("saving", [False, True])
def test_a_step_in_bfloat16_changes_the_weights(saving):
    trainer = trainer_on(DEVICE, torch.bfloat16, gradient_checkpointing=saving, beta=0.1)
    metrics = trainer.step([group("a", [0.0, 1.0, 0.5]), group("b", [1.0, 0.0, 0.0])])

    assert metrics["weights_version"] == 1
    assert 0 < metrics["grad_norm"] < float("inf")


@pytest.mark.parametrize("packing", ["padded", "shared"])
def test_experts_are_replayed_and_balanced_as_on_the_cpu_in_float64(packing):
    def trained(device: str, packing: str) -> tuple[torch.Tensor, dict[str, float]]:
        options = {"packing": packing, "router_replay": True, "router_aux_loss_coef": 0.1}
        config = GRPOConfig(dtype="float64", device=device, **options)
        learner = GRPOTrainer(config, model=tiny_moe().to(device)).learner
        rows, meter = rows_with_experts(9, 3, 6), Meter()
        rows = assign_weights(rows, config)
        accumulate(learner.policy, rows, meter)
        return torch.cat([one.grad.flatten() for one in learner.optimizer.masters]).cpu(), meter.result()

    truth, wanted = trained("cpu", packing)
    ours, metrics = trained(DEVICE, packing)

    assert (ours - truth).norm() <= 1e-6 * truth.norm()  # norms and routers compute in float32
    assert metrics["moe/load/max"] == pytest.approx(wanted["moe/load/max"])
    assert metrics["moe/aux_loss"] == pytest.approx(wanted["moe/aux_loss"], rel=1e-5)


@cuda_only
def test_peaks_of_a_step_are_those_of_the_plan():
    options = {"gradient_checkpointing": True, "packing": "padded"}
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 32_000}
    model = tiny(dtype=torch.bfloat16, max_position_embeddings=8192, **sizes).to(DEVICE)
    trainer = GRPOTrainer(GRPOConfig(dtype="bfloat16", **options), model=model)
    rows = [make_row([n % 30_000 for n in range(8193)], list(range(6145, 8193)), group=n) for n in range(2)]
    rows = assign_weights(rows, trainer.config)
    learner = trainer.learner
    accumulate(learner.policy, rows, Meter())
    learner.optimizer.step(1e-3)
    learner.optimizer.zero_grad()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    accumulate(learner.policy, rows, Meter())
    planned = planned_bytes(model, trainer.config, 8192)

    assert torch.cuda.max_memory_allocated() - before <= 1.2 * planned, (
        "a plan must not promise what does not fit"
    )


@cuda_only
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
def test_flex_attention_has_the_gradient_of_padded_rows(dtype, most):
    model = tiny(dtype=dtype, hidden_size=128, max_position_embeddings=4096).to(DEVICE)
    for length in (40, 128, 300, 77, 411, 256, 190, 333, 500, 61):  # most of them are lengths of no version
        rows = packed_rows(length)
        truth = gradient_of(model, pad_rows(rows))
        assert (gradient_of(model, pack_rows(rows)) - truth).norm() <= most * truth.norm(), length


@cuda_only
@pytest.mark.parametrize("name", sorted(SPECIAL))
def test_windows_soft_caps_and_sinks_have_the_gradient_of_padded_rows(name):
    model = special(name).to(DEVICE)
    rows = packed_rows(150, members=3)
    truth = gradient_of(model, pad_rows(rows))

    assert (gradient_of(model, pack_rows(rows)) - truth).norm() <= 1e-3 * truth.norm()
    assert Policy(model, GRPOConfig()).check() == []


@cuda_only
def test_a_long_pack_holds_nothing_for_pairs_of_tokens():
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    model = tiny(dtype=torch.bfloat16, max_position_embeddings=32_768, **sizes).to(DEVICE)
    rows = packed_rows(8192, members=3)
    gradient_of(model, pack_rows(rows))
    model.zero_grad()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradient_of(model, pack_rows(rows))
    planned = planned_bytes(model, GRPOConfig(dtype="bfloat16"), 32_768)

    assert torch.cuda.max_memory_allocated() - before <= 1.2 * planned, (
        "a plan counts nothing for pairs of tokens"
    )
