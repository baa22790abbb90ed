"""The experts that a real vLLM tells on a GPU are those of its model, and replaying them is exact.

`make gpu` runs this. Builds of vLLM for CPUs refuse the option: it needs the Model Runner V2, and that Triton.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentenv.engine import Sampling, load_engine
from agentenv.render import byte_tokenizer
from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import Policy
from agentenv.training.learners.torch.passes import score_rows
from agentenv.training.loop import save_tokenizer
from helpers.training import make_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed here"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
CHOSEN = 2
PROMPT = list(range(5, 85))


def saved_model(path: Path) -> Path:
    """Save a small mixture of experts whose second layer has no router."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    save_tokenizer(byte_tokenizer(), path)
    return path


def test_vllm_tells_the_experts_and_their_replay_agrees_with_its_logprobs(tmp_path):
    path = saved_model(tmp_path)
    engine = load_engine(f"vllm:{path}", dtype="float32", return_routed_experts=True, memory_share=0.2).engine

    async def play():
        first = await engine.generate(PROMPT, Sampling(max_tokens=24, seed=0), stop_token_ids=())
        longer = [*PROMPT, *first.token_ids, 7, 9]
        second = await engine.generate(longer, Sampling(max_tokens=24, seed=1), stop_token_ids=())
        await engine.close()
        return first, longer, second

    first, longer, second = asyncio.run(play())

    ids = [*longer, *second.token_ids]
    told = second.routed_experts
    assert (len(told), told.layers, told.choices, told.width) == (len(ids) - 1, 3, CHOSEN, 1)
    model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        output = model(input_ids=torch.tensor([ids[:-1]]), output_router_logits=True)
    logits = torch.stack(output.router_logits, 1)
    chosen = torch.from_numpy(told.array().astype("int64"))[:, [0, 2]]
    # Nearly equal experts may change places, so the logits of the told ones are compared.
    lost = logits.topk(CHOSEN).values.sum(-1) - logits.gather(-1, chosen).sum(-1)
    assert float(lost.max()) <= 1e-2
    row = replace(make_row(ids, list(range(len(longer), len(ids)))), routed_experts=told)
    (scores,) = score_rows(Policy(model, GRPOConfig(dtype="float32", router_replay=True)), [row])
    assert float((scores - torch.tensor(second.logprobs)).abs().max()) <= 1e-2
    # The tokens of the first turn were in the prefix cache, with the experts that were told then.
    assert told.part(0, 64) == first.routed_experts.part(0, 64)
