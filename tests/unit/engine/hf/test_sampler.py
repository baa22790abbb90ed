"""Drawing tokens, against the distributions written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentenv.engine import Sampling
from agentenv.engine.hf.attention import grouped_decode_attention
from agentenv.engine.hf.batching import common_prefix
from agentenv.engine.hf.sampler import UNIFORM_STEPS, _possible, draw


def left_of(logits, sampling):
    """Return the shares of what is left of a distribution, by sorting all of it; the first of equal tokens stays."""
    left = logits / (sampling.temperature or 1.0)
    if 0 < sampling.top_k < len(left):
        left[left < left.topk(sampling.top_k).values[-1]] = float("-inf")
    shares = left.softmax(-1)
    left[shares < sampling.min_p * shares.max()] = float("-inf")
    if sampling.top_p < 1:
        ordered, order = left.softmax(-1).sort(descending=True, stable=True)
        before = torch.cat([torch.zeros(1), ordered.cumsum(-1)[:-1]])
        left[order[before >= sampling.top_p]] = float("-inf")
    return dict(enumerate(left.softmax(-1).tolist()))


@pytest.mark.parametrize(
    "cut",
    [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}],
    ids=str,
)
def test_drawn_tokens_follow_the_distribution_and_carry_its_logprobs(cut):
    sampling = Sampling(temperature=0.8, **cut)
    logits = torch.randn(20, generator=torch.Generator().manual_seed(1)) * 2
    want = left_of(logits, sampling)
    grid = [(2 * step + 1) / 4096 for step in range(2048)]

    tokens, logprobs, supports = draw(logits.repeat(2048, 1), [sampling] * 2048, grid)

    for token in range(20):
        assert tokens.count(token) / 2048 == pytest.approx(want[token], abs=2 / 2048)
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert 2.718281828459045**logprob == pytest.approx(want[token], rel=1e-4)
    assert supports == {}  # nobody asked for them


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12),
    st.integers(0, UNIFORM_STEPS - 1),
    st.floats(0.05, 3),
)
def test_a_token_without_probability_is_never_drawn(values, step, temperature):
    logits = torch.tensor([values])

    (token,), (logprob,), _ = draw(
        logits.clone(), [Sampling(temperature=temperature)], [step / UNIFORM_STEPS]
    )

    shares = (logits[0] / temperature).softmax(-1)
    assert shares[token] > 0
    assert logprob == pytest.approx(shares[token].log().item(), abs=1e-4)


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_common_prefix_is_the_longest(left, right):
    length = common_prefix(left, right)

    assert left[:length] == right[:length]
    assert length == min(len(left), len(right)) or left[length] != right[length]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("additive", [True, False])
def test_folded_heads_attend_like_repeated_ones(dtype, additive):
    torch.manual_seed(0)
    module = torch.nn.Module().eval()
    query = torch.randn(3, 6, 1, 8, dtype=dtype)
    key, value = torch.randn(2, 3, 2, 20, 8, dtype=dtype)[..., :11, :]  # as in buffers, which are longer
    mask = torch.zeros(3, 1, 1, 11, dtype=dtype)
    mask[1, ..., 5:] = torch.finfo(dtype).min

    got, _ = grouped_decode_attention(module, query, key, value, mask if additive else mask == 0, scaling=0.3)

    repeated = (part.repeat_interleave(3, dim=1).double() for part in (key, value))
    keys, values = repeated
    weights = (query.double() @ keys.transpose(2, 3) * 0.3 + mask.double()).softmax(-1)
    want = (weights @ values).transpose(1, 2)
    assert torch.allclose(got.double(), want, atol=1e-5 if dtype is torch.float32 else 2e-2)


cuts = st.fixed_dictionaries(
    {},
    optional={"top_k": st.integers(0, 15), "top_p": st.floats(0.05, 1), "min_p": st.floats(0, 0.5)},
)


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=12),
    st.integers(0, UNIFORM_STEPS - 1),
    st.floats(0.1, 3),
    cuts,
)
def test_a_logprob_is_that_of_the_renormalised_support(values, step, temperature, cut):
    logits = torch.tensor(values)
    sampling = Sampling(temperature=temperature, keep_support=True, **cut)

    (token,), (logprob,), supports = draw(logits[None].clone(), [sampling], [step / UNIFORM_STEPS])

    if not sampling.is_cut:
        assert supports == {}
        return
    support = list(supports[0])
    assert token in support
    assert support == sorted(set(support))
    renormalised = (logits[support] / temperature).log_softmax(-1)[support.index(token)]
    assert logprob == pytest.approx(float(renormalised), abs=1e-4)


@given(
    st.lists(
        st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0, 4.0]), min_size=12, max_size=12),
        min_size=1,
        max_size=4,
    ),
    st.lists(cuts, min_size=4, max_size=4),
    st.lists(st.integers(0, UNIFORM_STEPS - 1), min_size=4, max_size=4),
)
def test_rows_are_cut_together_as_each_alone_with_its_whole_vocabulary(rows, limits, steps):
    logits = torch.tensor(rows)
    samplings = [Sampling(keep_support=True, **cut) for cut in limits[: len(rows)]]
    uniforms = [step / UNIFORM_STEPS for step in steps[: len(rows)]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentenv.engine.hf.sampler.CANDIDATES", (2, 5))
        tokens, logprobs, supports = draw(logits.clone(), samplings, uniforms)

    for row, (sampling, uniform) in enumerate(zip(samplings, uniforms, strict=True)):
        alone = draw(logits[row : row + 1].clone(), [sampling], [uniform])
        assert (tokens[row], supports.get(row)) == (alone[0][0], alone[2].get(0))
        assert logprobs[row] == pytest.approx(alone[1][0], abs=1e-6)
        kept = {token for token, share in left_of(logits[row], sampling).items() if share > 0}
        if sampling.is_cut:
            assert set(supports[row]) == kept


def test_a_search_that_ends_at_a_token_of_weight_0_takes_the_likeliest_one():
    weights = torch.tensor([[0.5, 0.0, 1.0], [0.5, 0.0, 1.0], [0.0, 1.0, 0.0]])

    assert _possible(torch.tensor([1, 0, 2]), weights).tolist() == [2, 0, 1]


def test_greedy_rows_beside_sampled_ones_take_the_likeliest_token_at_temperature_one():
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    samplings = [Sampling(temperature=0), Sampling(temperature=0.5), Sampling(temperature=0)]

    tokens, logprobs, _ = draw(logits.clone(), samplings, [0.99, 0.0, 0.99])

    assert tokens == [1, 0, 0]
    shares = logits.log_softmax(-1)
    assert [logprobs[0], logprobs[2]] == pytest.approx([shares[0, 1].item(), shares[2, 0].item()])


def test_numbers_that_are_not_finite_stay_so_when_a_row_is_cut():
    logits = torch.tensor([[0.0, float("nan"), 1.0], [float("inf"), 0.0, 1.0], [0.0, 1.0, 2.0]])

    _, logprobs, _ = draw(logits, [Sampling(top_p=0.9, top_k=2)] * 3, [0.5] * 3)

    assert [logprob == logprob and abs(logprob) < 99 for logprob in logprobs] == [False, False, True]


def test_of_a_support_that_is_too_large_only_the_size_is_returned():
    flat = torch.zeros(2, 5000)

    tokens, _, supports = draw(flat, [Sampling(top_p=0.9, keep_support=True)] * 2, [0.5, 0.0])

    assert supports == {0: 4500, 1: 4500}
    assert all(token < 5000 for token in tokens)
