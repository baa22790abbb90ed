"""Flex attention over the prefix tree: its blocks, and its numbers against a mask of all pairs and padded rows.

PyTorch refuses gradients of flex attention on the CPU, because its compiler writes no code for them there. Its
reference computes them all the same, and these tests trace it as the compiler does. It applies the mask to
every pair; the compiled forward pass, which also runs here, follows the lists of blocks.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import CostModel, Policy, pack_rows
from agentenv.training.learners.torch import flex as flex_module
from agentenv.training.learners.torch.attention import BLOCK, Node
from agentenv.training.learners.torch.flex import PackMask, attend, pack_mask
from agentenv.training.learners.torch.pack_attention import unpackable
from agentenv.training.learners.torch.packing import pad_rows
from helpers.packs import block_mask, gradient_of
from helpers.ranks import run_driver
from helpers.rope import SHAPE
from helpers.training import make_row

# PyTorch's compiler warns of its own code.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="PyTorch compiles for the CPU with g++, which is not installed"
)

SIZES = SHAPE | {"max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
MODELS = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "mistral": (MistralConfig, {"sliding_window": 40}),
    "gemma3": (Gemma3TextConfig, {"head_dim": 16, "sliding_window": 40}),
    "gemma2": (Gemma2Config, {"head_dim": 16, "sliding_window": 40, "attn_logit_softcapping": 2.0}),
    "gpt-oss": (GptOssConfig, {"head_dim": 16, "sliding_window": 40, **MOE}),
}
EAGER = ("gemma2", "gpt-oss")


@pytest.fixture
def gradients(monkeypatch):
    """Let flex attention compute gradients on the CPU, traced but not compiled, for any number of shapes."""
    import torch._dynamo

    torch._dynamo.reset()
    traced = torch.compile(torch_flex.flex_attention, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_module, "_kernel", lambda device: traced)
    with torch._dynamo.config.patch(recompile_limit=256):
        yield
    torch._dynamo.reset()


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Let flex attention run as it does on CUDA, compiled; what is compiled is kept nowhere else."""
    import torch._dynamo

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(flex_module, "_kernel", lambda device: flex_module._compiled())
    torch._dynamo.reset()
    flex_module._compiled.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    flex_module._compiled.cache_clear()
    torch._dynamo.reset()


def model_of(name: str):
    kind, options = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        kind(**SIZES, **options), attn_implementation="eager" if name in EAGER else "sdpa"
    )
    for weight in model.parameters():
        if weight.dim() == 1:  # sinks of 0 and norms of 1 would hide what is done with them
            torch.nn.init.normal_(weight, 0.5, 0.5)
    return model.to(torch.float32 if name == "gpt-oss" else torch.float64).eval()  # experts take no float64


def policy_of(name: str, **options) -> Policy:
    policy = Policy(model_of(name), GRPOConfig(**options))
    policy.way, policy.pack_reason = "flex", ""
    return policy


def rows_of(*, prompt: int = 150, own: int = 120, members: int = 3):
    """Return rows of a group with turns in common, and one row that shares nothing with them."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 61, (prompt + own * members,), generator=draw).tolist()
    rows = []
    for member in range(members):
        fork = prompt - 20 * (member == members - 1)
        row = [*ids[:fork], member, *ids[prompt + own * member : prompt + own * (member + 1)]]
        rows.append(make_row(row, list(range(fork + 1, len(row), 3))))
    rows.append(make_row([60, *ids[5:75]], [30, 60, 70]))
    return rows


def tree_of(lengths: list[int], shared: list[int]) -> tuple[tuple[Node, ...], torch.Tensor]:
    """Return the nodes and depths of a pack of rows, each of which begins with so many tokens of the last."""
    rows, ids = [], []
    for number, (length, common) in enumerate(zip(lengths, shared, strict=True)):
        ids = [*ids[:common], *[number] * (length - min(common, len(ids)))]
        rows.append(make_row([*ids, 0], [length]))
    packed = pack_rows(rows)
    return packed.tree, packed.positions_BT[0]


TREES = {
    "short": ([20, 30, 9], [0, 5, 5]),
    "two groups": ([200, 260, 300, 170, 400], [0, 150, 150, 0, 130]),
    "forks": ([500, 480, 470, 300, 290], [0, 400, 380, 128, 256]),
    "a block each": ([256, 256, 256], [0, 128, 128]),
    "apart": ([128, 128, 129, 127], [0, 0, 0, 0]),
}
trees = pytest.mark.parametrize("name", TREES)


def dense(count: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return a list of blocks as a matrix."""
    count, numbers = count[0, 0], numbers[0, 0]
    matrix = torch.zeros(numbers.shape, dtype=torch.bool)
    for row, (most, columns) in enumerate(zip(count.tolist(), numbers.tolist(), strict=True)):
        matrix[row, columns[:most]] = True
    return matrix


def blocks_of(mask) -> tuple[torch.Tensor, torch.Tensor]:
    return dense(mask.kv_num_blocks, mask.kv_indices), dense(mask.full_kv_num_blocks, mask.full_kv_indices)


@trees
def test_the_blocks_are_those_that_pytorch_finds_in_the_mask_of_all_pairs(name):
    nodes, depths = tree_of(*TREES[name])
    ours = pack_mask(nodes, depths, device=torch.device("cpu"))
    size = len(depths)
    truth = torch_flex.create_block_mask(ours.mask_mod, 1, 1, size, size, device="cpu")

    assert ours.shape == truth.shape
    assert all(map(torch.equal, blocks_of(ours), blocks_of(truth)))
    assert torch.equal(ours.q_num_blocks, truth.q_num_blocks)
    assert torch.equal(
        torch_flex.create_mask(ours.mask_mod, 1, 1, size, size, "cpu")[0, 0], block_mask(nodes)
    )


@trees
@pytest.mark.parametrize("window", [1, 40, 200])
def test_a_window_counts_the_tokens_of_a_row_and_not_what_lies_between_them(name, window):
    nodes, depths = tree_of(*TREES[name])
    ours = pack_mask(nodes, depths, device=torch.device("cpu"), window=window)
    size = len(depths)
    keep = block_mask(nodes) & (depths[:, None] - depths[None, :] < window)
    truth = torch_flex.create_block_mask(
        lambda batch, head, query, key: keep[query, key], 1, 1, size, size, device="cpu"
    )
    in_part, in_full = blocks_of(ours)
    true_part, true_full = blocks_of(truth)

    assert torch.equal(torch_flex.create_mask(ours.mask_mod, 1, 1, size, size, "cpu")[0, 0], keep)
    assert not (in_full & ~true_full).any(), "a block in full is not looked at"
    assert not ((true_part | true_full) & ~(in_part | in_full)).any(), "nothing that is seen is left out"
    assert not (in_part & in_full).any()


def test_a_window_leaves_out_the_blocks_before_it():
    size = 16 * BLOCK
    mask = pack_mask(
        (Node(0, size, size),), torch.arange(size), device=torch.device("cpu"), window=BLOCK // 2
    )
    in_part, in_full = blocks_of(mask)

    assert not in_full.any()
    assert in_part.sum() == 16 + 15


def test_a_pack_holds_nothing_for_pairs_of_tokens():
    size = 64 * BLOCK
    nodes = (Node(0, size // 2, size), *(Node(at, at + 64, at + 64) for at in range(size // 2, size, 64)))
    mask = pack_mask(nodes, torch.arange(size), device=torch.device("cpu"))
    held = [one for one in vars(mask).values() if isinstance(one, torch.Tensor)]
    held += [cell.cell_contents for cell in mask.mask_mod.__closure__]

    assert sum(one.nbytes for one in held) < size * size / 100


@pytest.mark.parametrize(
    ("name", "on_cpu"),
    [
        ("llama", ""),
        ("gemma3", "no sliding window"),
        ("mistral", "no sliding window"),
        ("gemma2", "eager attention"),
        ("gpt-oss", "eager attention"),
    ],
)
def test_which_models_a_device_packs(name, on_cpu):
    model = model_of(name)
    found = {where: unpackable(model, model.config, torch.device(where)) for where in ("cuda", "cpu", "xpu")}

    assert found["cuda"] == ""
    assert on_cpu in found["cpu"]
    assert bool(found["cpu"]) == bool(on_cpu)
    assert found["xpu"]


@pytest.mark.parametrize("members", [2, 8])
def test_the_cost_of_a_pack_counts_the_blocks_that_are_computed(members):
    prompt, own = 1000, 700
    lengths, shared = [prompt + own] * members, [0] + [prompt] * (members - 1)
    nodes, depths = tree_of(lengths, shared)
    mask = pack_mask(nodes, depths, device=torch.device("cpu"))
    computed = sum(int(one.sum()) for one in blocks_of(mask)) * BLOCK**2
    cost = CostModel(attention=1.0, overhead=0.0, way="flex")
    pairs = prompt**2 / 2 + members * ((prompt + own) ** 2 - prompt**2) / 2

    assert cost.packed(len(depths), pairs, members) - len(depths) == pytest.approx(computed, rel=0.1)


class Layer(torch.nn.Module):
    """Stands for an attention layer."""


BIASED = "passes a bias or dropout"


@pytest.mark.parametrize(
    ("mask", "given", "words"),
    [
        ({"window": 5}, {}, "sliding_window=None to its attention, but the config of the model says 5"),
        ({}, {"sliding_window": 5}, "passes sliding_window=5"),
        ({"softcap": 50.0}, {}, "softcap=None to its attention, but the config of the model says 50"),
        ({}, {"position_bias": torch.zeros(1)}, BIASED),
        ({}, {"dropout": 0.1}, BIASED),
    ],
)
def test_a_layer_that_does_not_say_what_it_computes_is_refused(mask, given, words):
    made = pack_mask((Node(0, 4, 4),), torch.arange(4), device=torch.device("cpu"), **mask)
    query = torch.zeros(1, 2, 4, 8)

    with pytest.raises(ValueError, match=words):
        attend(Layer(), query, query, query, made, **given)


def test_rows_of_a_model_that_flex_attention_fails_with_are_padded_and_it_says_why(monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("the kernel needs more shared memory\nthan there is")

    monkeypatch.setattr("agentenv.training.learners.torch.flex.attend", fail)
    policy = policy_of("llama")

    (finding,) = policy.check()

    assert finding == ("rows are padded, not packed: OutOfMemoryError: the kernel needs more shared memory")
    assert not policy.packable


# What runs the reference --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2)])
def test_attention_equals_attention_under_the_mask_of_all_pairs(gradients, heads):
    nodes, depths = tree_of(*TREES["two groups"])
    mask = pack_mask(nodes, depths, device=torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, count, len(depths), 8, dtype=torch.float64, generator=draw).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    )
    weights = torch.randn(1, len(depths), heads[0], 8, dtype=torch.float64, generator=draw)

    def run(output):
        return [output, *torch.autograd.grad((output * weights).sum(), (query, key, value))]

    ours = run(attend(Layer(), query, key, value, mask, scaling=0.3))
    repeated = (one.repeat_interleave(heads[0] // heads[1], 1) for one in (key, value))
    under = scaled_dot_product_attention(query, *repeated, attn_mask=block_mask(nodes), scale=0.3)

    for left, right in zip(ours, run(under.transpose(1, 2)), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("saving", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_have_the_numbers_of_padded_ones(gradients, name, saving):
    policy = policy_of(name, gradient_checkpointing=saving)
    rows = rows_of()

    packed, padded = gradient_of(policy, pack_rows(rows)), gradient_of(policy, pad_rows(rows))

    # Norms and soft caps compute in float32 whatever the weights are.
    torch.testing.assert_close(packed[0], padded[0], rtol=0, atol=1e-5)
    assert (packed[1] - padded[1]).norm() <= 1e-5 * padded[1].norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_check_at_the_start_finds_flex_attention_exact(gradients, name):
    policy = policy_of(name)

    assert policy.check() == []


@pytest.mark.slow
def test_the_check_at_the_start_finds_blocks_that_are_wrong(gradients, monkeypatch):
    """Rows that fit into one block do not show it."""
    right = flex_module._sees

    def narrow(end_T, depth_T, window):
        return right(end_T, depth_T, 100)

    monkeypatch.setattr(flex_module, "_sees", narrow)
    policy = policy_of("llama")

    assert "packed gradients of longer rows are off" in policy.check()[0]
    assert not policy.packable


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EAGER, "gemma3", "llama"])
def test_a_row_alone_takes_flex_attention_where_the_models_own_holds_pairs(gradients, monkeypatch, name):
    policy = policy_of(name)
    row = rows_of()[0]
    truth = gradient_of(policy, pad_rows([row, row]))
    seen: list[PackMask] = []
    monkeypatch.setattr(
        "agentenv.training.learners.torch.flex.attend",
        lambda module, *given, **options: seen.append(given[3]) or attend(module, *given, **options),
    )

    alone = policy.score(pack_rows([row]))[0]

    assert len(seen) == (0 if name == "llama" else policy.model.config.num_hidden_layers)
    torch.testing.assert_close(alone, truth[0][: len(alone)], rtol=0, atol=1e-5)


SHARDED = """
import warnings
from torch.nn.attention import flex_attention as torch_flex
from transformers import AutoConfig, AutoModelForCausalLM
from agentenv.training.learners.torch import flex, pack_rows
from agentenv.training.learners.torch.packing import pad_rows

warnings.simplefilter("ignore")
torch_flex._validate_device = lambda *_: None
traced = torch.compile(torch_flex.flex_attention, backend="aot_eager", fullgraph=True)
flex._kernel = lambda device: traced
SIZES = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, sliding_window=40, layer_types=["full_attention", "sliding_attention"],
)


def compare():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3_text", **SIZES)).double().eval()
    policy = Policy(model, GRPOConfig(fsdp=True, gradient_checkpointing=True, dtype="float64"))
    policy.shard()
    assert policy.world.sharded
    rows = [make_row([*range(50), n, *range(60), *range(30)], list(range(60, 120))) for n in range(3)]
    found = []
    assert "no sliding window" in policy.pack_reason  # on the CPU
    policy.way, policy.pack_reason = "flex", ""
    for laid_out in (pad_rows, pack_rows):
        model.zero_grad()
        policy.score(laid_out(rows))[0].sum().backward()
        found.append(torch.cat([local(one.grad).flatten() for one in model.parameters()]))
    model.zero_grad()
    findings = policy.check()
    assert findings == [], findings
    assert (found[0] - found[1]).norm() <= 1e-6 * found[0].norm()


play(compare, 2)
"""


@pytest.mark.exhaustive
def test_a_sharded_model_hands_the_mask_of_a_pack_through():
    run_driver(SHARDED)


@pytest.mark.slow
def test_few_versions_of_the_kernel_serve_all_lengths(gradients):
    from torch._dynamo.utils import counters

    made = []
    for length in (150, 170, 260, 333, 401, 280, 512):
        compare_forward(*tree_of([length, length], [0, 100]), window=None)
        made.append(counters["stats"]["unique_graphs"])

    assert made[0] < made[2] == made[-1], f"versions after each length: {made}"


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize(("name", "window"), [("forks", None), ("two groups", 60)])
def test_the_compiled_kernel_follows_the_blocks(compiled, name, window):
    """For one length: for any length PyTorch 2.13 writes wrong C++. Triton's code is another."""
    compare_forward(*tree_of(*TREES[name]), window=window)


def compare_forward(nodes, depths, window):
    """Compare a forward pass with attention under the mask of all pairs."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, len(depths), 16, generator=draw) for heads in (4, 2, 2))
    mask = pack_mask(nodes, depths, device=torch.device("cpu"), window=window)
    keep = block_mask(nodes)
    if window is not None:
        keep &= depths[:, None] - depths[None, :] < window
    with torch.no_grad():
        ours = attend(Layer(), query, key, value, mask, scaling=0.25, sliding_window=window)
    truth = scaled_dot_product_attention(query, key, value, attn_mask=keep, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(ours, truth.transpose(1, 2), rtol=0, atol=1e-5)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.exhaustive)])
def test_a_model_scores_packs_with_the_compiled_kernel(compiled, name):
    policy = policy_of(name)
    policy.model.float()
    rows = rows_of()

    with torch.no_grad():
        packed, padded = policy.score(pack_rows(rows))[0], policy.score(pad_rows(rows))[0]

    torch.testing.assert_close(packed, padded, rtol=0, atol=1e-3)
