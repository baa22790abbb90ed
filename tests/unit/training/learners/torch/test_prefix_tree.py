"""Attention over the prefix tree, against plain attention row by row and against a block mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaForCausalLM

from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import Policy, pack_rows
from agentenv.training.learners.torch.attention import Node, tree_attention
from agentenv.training.learners.torch.pack_attention import enable_packs
from agentenv.training.learners.torch.packing import plan
from agentenv.training.rows import Row
from helpers.packs import block_mask
from helpers.training import make_row, tiny


def row(ids: list[int]) -> Row:
    return make_row(ids, [len(ids) - 1])


def llama(**options) -> LlamaForCausalLM:
    return tiny(dtype=torch.float32, initializer_range=0.02, **options)


def heads_of(tokens: int, heads: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(1, heads, tokens, 8, dtype=torch.float64, generator=draw).requires_grad_()


token_lists = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=2, max_size=8)


@given(token_lists)
def test_each_token_of_a_tree_sees_its_row_and_nothing_else(sequences):
    packed = pack_rows([row(ids) for ids in sequences])
    assert packed.tree is not None

    keep = block_mask(packed.tree)
    ids, depths = packed.ids_BT[0], packed.positions_BT[0]

    assert sum(node.stop - node.start for node in packed.tree) == len(ids)
    for number, token_ids in enumerate(sequences):
        last = int(packed.index_N[number])
        seen = keep[last].nonzero().flatten()
        assert ids[seen].tolist() == token_ids[:-1]
        assert depths[seen].tolist() == list(range(len(token_ids) - 1))


@given(token_lists, st.sampled_from([1, 2, 4]), st.integers(0, 100))
@settings(max_examples=40)
def test_attention_over_a_tree_equals_attention_under_its_mask(sequences, kv_heads, seed):
    nodes = pack_rows([row(ids) for ids in sequences]).tree
    size = max(node.stop for node in nodes)
    query, key, value = (
        heads_of(size, 4, seed),
        heads_of(size, kv_heads, seed + 1),
        heads_of(size, kv_heads, 7),
    )
    weights = heads_of(size, 4, 8).detach()

    def run(output: torch.Tensor) -> list[torch.Tensor]:
        return [output, *torch.autograd.grad((output * weights).sum(), (query, key, value))]

    ours = run(tree_attention(query, key, value, nodes, scale=0.3).transpose(1, 2))
    repeated = (one.repeat_interleave(4 // kv_heads, 1) for one in (key, value))
    truth = run(scaled_dot_product_attention(query, *repeated, attn_mask=block_mask(nodes), scale=0.3))

    for left, right in zip(ours, truth, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


def test_attention_over_a_tree_passes_gradcheck():
    nodes = (Node(3, 5, 5), Node(5, 7, 7), Node(0, 3, 7))
    inputs = heads_of(7, 2, 1), heads_of(7, 1, 2), heads_of(7, 1, 3)

    assert torch.autograd.gradcheck(lambda *given: tree_attention(*given, nodes), inputs)


def test_a_model_without_a_tree_computes_what_it_computed_before():
    model = llama()
    ids = torch.tensor([[5, 6, 7, 8]])
    before = model(ids).logits

    enable_packs(model)
    enable_packs(model)

    assert model.config._attn_implementation == "sdpa+packs"
    assert torch.equal(model(ids).logits, before)


def test_rows_are_padded_where_attention_has_an_argument_that_the_tree_does_not_take():
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, given: (args, given | {"sliding_window": 5}), with_kwargs=True
        )
    policy = Policy(model, GRPOConfig())
    assert policy.packable

    (finding,) = policy.check()

    assert not policy.packable
    assert finding.startswith("rows are padded, not packed: ValueError")
    assert "passes sliding_window, which tree attention does not support" in finding


def test_gradient_checkpointing_computes_the_same_over_a_tree():
    rows = [row([*range(12), n, n + 1]) for n in range(20, 24)]

    def gradient(**options) -> torch.Tensor:
        policy = Policy(llama(), GRPOConfig(**options))
        policy.score(pack_rows(rows))[0].sum().backward()
        return torch.cat([one.grad.flatten() for one in policy.model.parameters()])

    torch.testing.assert_close(gradient(gradient_checkpointing=True), gradient(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_dense_and_the_same_whether_or_not_the_embeddings_are_the_head(tied):
    rows = [row([*range(12), n, n + 1]) for n in range(20, 24)]
    model, plain = llama(tie_word_embeddings=tied), llama(tie_word_embeddings=tied)
    micro = pack_rows(rows)

    Policy(model, GRPOConfig()).score(micro)[0].sum().backward()
    for one in rows:
        log_p = torch.log_softmax(plain(torch.tensor([one.token_ids[:-1]])).logits[0, -1], -1)
        log_p[one.token_ids[-1]].backward()

    for ours, truth in zip(model.parameters(), plain.parameters(), strict=True):
        assert not ours.grad.is_sparse
        torch.testing.assert_close(ours.grad, truth.grad, rtol=1e-4, atol=1e-6)


def test_a_pack_is_as_long_as_a_pass_may_be():
    prompt = [1] * 1500
    rows = [row([*prompt, 2 + number, *[3] * 1000]) for number in range(6)]
    rows.append(row([9] * 6000))

    (micro,) = plan(rows, layout="shared", max_tokens=16_000)

    assert (len(micro.rows), micro.ids_BT.numel()) == (7, 1500 + 6 * 1000 + 5999)
    assert micro.tree is not None
