"""Training on tokens of a cut distribution: everything is that of the softmax over the recorded support."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import agentenv as ae
from agentenv.core import SequenceBuilder, Supports, TokenSequence, TokenSpan, TrajectoryGroup, UsageError
from agentenv.engine import Sampling, TransformersEngine
from agentenv.envs import ToolEnv
from agentenv.render import byte_tokenizer
from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import Policy, heads, pack_rows
from agentenv.training.learners.torch.logprob import chunked_logprobs, plain_logprobs
from agentenv.training.learners.torch.packing import pad_rows
from agentenv.training.learners.torch.passes import score_rows
from agentenv.training.learners.torch.reference import Reference, Teacher
from agentenv.training.rows import TokenSupports, fit_rows, make_row
from agentenv.training.served_teacher import ServedTeacher
from helpers import prompts
from helpers.training import episode, tiny, tiny_gpt2, trainer_of
from scenes import spec_of

CUTS = [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"top_k": 12, "top_p": 0.8, "min_p": 0.02}]
V, H = 61, 8


def tensors(supports: list[list[int]]) -> TokenSupports | None:
    """Return supports as tensors; an empty list is a token of the whole distribution."""
    flat = [token for support in supports for token in support]
    lengths = torch.tensor([len(support) for support in supports])
    return TokenSupports(torch.tensor(flat, dtype=torch.int32), lengths) if flat else None


def truth_of(logits_NV, labels_N, supports, temperature) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy, one token after the other, each by a softmax over its support alone."""
    logprobs, entropies = [], []
    for logits, label, support in zip(logits_NV, labels_N.tolist(), supports, strict=True):
        kept = support or list(range(len(logits)))
        log_p = torch.log_softmax(logits[kept] / temperature, -1)
        logprobs.append(log_p[kept.index(label)])
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@st.composite
def problems(draw):
    """Hidden states, head, labels and supports of some tokens, cut and uncut ones in one batch."""
    count, seed = draw(st.integers(1, 9)), draw(st.integers(0, 99))
    generator, random = torch.Generator().manual_seed(seed), Random(seed)
    hidden, weight = (torch.randn(n, H, generator=generator, dtype=torch.float64) for n in (count, V))
    labels = [random.randrange(V) for _ in range(count)]
    supports = [
        sorted({label, *random.sample(range(V), random.choice((0, random.randrange(V))))})
        if random.random() < 0.7
        else []
        for label in labels
    ]
    return hidden, weight, torch.tensor(labels), supports


@given(
    problems(),
    st.sampled_from([1, 2, 4, 256]),
    st.sampled_from([0.7, 1.0]),
    st.sampled_from([None, 2.0]),
    st.booleans(),
)
@settings(max_examples=30)
def test_scores_and_gradients_are_those_of_a_softmax_over_the_support(
    problem, chunk, temperature, softcap, keep
):
    hidden, weight, labels, supports = problem
    of_logprob = torch.linspace(-1, 2, len(labels), dtype=torch.float64)
    of_entropy = torch.linspace(1, -1, len(labels), dtype=torch.float64)

    def gradients(score):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropy = score(h, w)
        both = torch.autograd.grad((of_logprob * logprobs + of_entropy * entropy).sum(), (h, w))
        of_entropy_alone = torch.autograd.grad((of_entropy * score(h, w)[1]).sum(), (h, w))
        return logprobs.detach(), entropy.detach(), *both, *of_entropy_alone

    def capped(h, w):
        logits = h @ w.T
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    truth = gradients(lambda h, w: truth_of(capped(h, w), labels, supports, temperature))
    options = {"temperature": temperature, "supports": tensors(supports)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentenv.training.learners.torch.logprob.KEPT_BYTES", 1 << 20 if keep else 3 * V * 8)
        chunked = gradients(
            lambda h, w: chunked_logprobs(h, w, labels, chunk=chunk, softcap=softcap, **options)
        )
    plain = gradients(lambda h, w: plain_logprobs(capped(h, w), labels, **options))

    for ours in (chunked, plain):
        for value, wanted in zip(ours, truth, strict=True):
            assert (value - wanted).abs().max() <= 1e-10


# From an episode to a row -----------------------------------------------------------------


def sequence_with(supports: Supports | None, version: int = 0) -> TokenSequence:
    return TokenSequence(
        (
            TokenSpan("prompt", (1, 2, 3)),
            TokenSpan("model", (4, 5), (-0.5, -0.6), version, 0, supports),
            TokenSpan("env", (9, 9)),
            TokenSpan("model", (6,), (-0.7,), 1, 1),
        )
    )


def test_a_row_has_the_support_of_each_trained_token():
    kept = Supports.of([(4, 7), (5, 8, 60)])

    whole = make_row(sequence_with(kept), 1.0, 0, 0)
    uncut = make_row(sequence_with(None), 1.0, 0, 0)
    shown = make_row(sequence_with(kept), 1.0, 0, 0, demonstration=True)

    assert whole.supports.lengths_N.tolist() == [2, 3, 0]
    assert whole.supports.token_ids.tolist() == [4, 7, 5, 8, 60]
    assert uncut.supports is None
    assert shown.supports is None  # what is imitated competes with all tokens
    with pytest.raises(UsageError, match="token id 60 is outside"):
        list(fit_rows([whole], None, 60, {}))


def random_rows(count: int = 5) -> list:
    random = Random(3)
    prompt = [random.randrange(V) for _ in range(6)]
    rows = []
    for number in range(count):
        sampled = [random.randrange(V) for _ in range(3 + number)]
        kept = [{token, *random.sample(range(V), 9)} for token in sampled]
        builder = SequenceBuilder()
        builder.append("prompt", prompt)
        supports = Supports.of(kept) if number % 2 else None
        builder.append("model", sampled, logprobs=[-1.0] * len(sampled), turn=0, supports=supports)
        rows.append(make_row(builder.freeze(), 1.0, number, 0))
    return rows


def truth_of_rows(model, rows, temperature) -> torch.Tensor:
    values = []
    for row in rows:
        logits = model(torch.tensor([row.token_ids])).logits[0][row.positions_n - 1]
        ids = iter([] if row.supports is None else row.supports.token_ids.tolist())
        lengths = [0] * row.num_trained if row.supports is None else row.supports.lengths_N.tolist()
        supports = [[next(ids) for _ in range(length)] for length in lengths]
        labels = torch.tensor(row.token_ids)[row.positions_n]
        values.append(truth_of(logits, labels, supports, temperature)[0])
    return torch.cat(values)


@pytest.mark.parametrize("head_way", ["matrix", "own", "whole"])
@pytest.mark.parametrize("layout", [pad_rows, pack_rows])
def test_cut_and_uncut_rows_of_one_batch_are_scored_each_in_its_own_way(layout, head_way, monkeypatch):
    monkeypatch.setitem(chunked_logprobs.__kwdefaults__, "chunk", 3)
    monkeypatch.setattr(heads, "OWN_CHUNK", 3)
    rows, model = random_rows(), tiny_gpt2()
    policy = Policy(model, GRPOConfig(temperature=0.8))
    policy.head_way = head_way

    logprobs, _ = policy.score(layout(rows))
    weights = torch.linspace(-1, 1, len(logprobs), dtype=torch.float64)
    ours = torch.autograd.grad((weights * logprobs).sum(), list(model.parameters()))
    wanted = truth_of_rows(model, rows, 0.8)
    truth = torch.autograd.grad((weights * wanted).sum(), list(model.parameters()))

    assert (logprobs - wanted).abs().max() <= 1e-10
    for one, other in zip(ours, truth, strict=True):
        assert (one - other).abs().max() <= 1e-10


def test_the_reference_and_a_teacher_are_renormalised_over_the_same_support():
    rows, config = random_rows(), GRPOConfig(beta=0.1, temperature=0.8)
    model, other = tiny(), tiny(seed=5)
    reference = Reference(Policy(model, config))
    reference.freeze()

    own = torch.cat(reference.score(rows))
    taught = torch.cat(Teacher(other, config).score(rows))

    with torch.no_grad():
        assert (own - truth_of_rows(model, rows, 0.8)).abs().max() <= 1e-10
        assert (taught - truth_of_rows(other, rows, 0.8)).abs().max() <= 1e-10


def test_a_teacher_behind_a_server_cannot_score_cut_distributions():
    teacher = object.__new__(ServedTeacher)
    teacher._scorer = type("Scorer", (), {"max_tokens": None, "name": "http://t"})()

    with pytest.raises(UsageError, match="whole vocabulary"):
        teacher.score(random_rows())


# With the engine --------------------------------------------------------------------------


async def sampled(engine, prompt, *, stops=(), **asked) -> TokenSequence:
    """Let the engine answer a prompt; return both as a sequence."""
    done = await engine.generate(prompt, Sampling(keep_support=True, **asked), stop_token_ids=stops)
    builder = SequenceBuilder()
    builder.append("prompt", prompt)
    builder.append_completion(
        done.token_ids, done.logprobs, done.version_ranges, turn=0, supports=done.supports
    )
    return builder.freeze()


@pytest.mark.parametrize("cut", CUTS, ids=str)
async def test_on_policy_the_ratio_is_one(cut):
    model = tiny(dtype=torch.float32, initializer_range=0.15)
    engine, cut = TransformersEngine(model), {"temperature": 0.9, "max_tokens": 12, **cut}

    prompts_ = enumerate([(1, 2, 3), (4, 5, 6, 7)])
    rows = [make_row(await sampled(engine, prompt, seed=n, **cut), 1.0, 0, 0) for n, prompt in prompts_]
    policy = Policy(model, GRPOConfig(temperature=0.9))
    scored = score_rows(policy, rows)
    whole = score_rows(policy, [replace(row, supports=None) for row in rows])
    await engine.close()

    for row, values, without in zip(rows, scored, whole, strict=True):
        assert (row.supports.lengths_N < V).any()
        assert (values - row.sampler_n).abs().max() < 1e-5
        assert (without - row.sampler_n).max() < -1e-3  # so far off would be the ratio without supports


async def test_what_a_grammar_left_is_trained_as_it_was_sampled():
    pytest.importorskip("llguidance", reason="needs the grammar extra")
    model = tiny(dtype=torch.float32, initializer_range=0.15, vocab_size=300)
    engine = TransformersEngine(model, byte_tokenizer())
    asked = {
        "grammar": 'start: "r" ("ed" | "oo"+) /[a-z]{9}/',
        "temperature": 0.9,
        "top_k": 8,
        "seed": 1,
        "stops": (258,),
    }

    row = make_row(await sampled(engine, (1, 2, 3), **asked), 1.0, 0, 0)
    (scored,) = score_rows(Policy(model, GRPOConfig(temperature=0.9)), [row])
    await engine.close()

    assert row.supports.lengths_N.tolist()[:2] == [1, 2]
    assert max(row.supports.lengths_N.tolist()) == 8
    assert (scored - row.sampler_n).abs().max() < 1e-5


async def test_a_support_that_is_too_large_makes_the_completion_untrainable(monkeypatch):
    monkeypatch.setattr("agentenv.engine.hf.sampler.MOST_TOKENS", 10)
    engine = TransformersEngine(tiny(dtype=torch.float32, initializer_range=0.02))
    asked = Sampling(top_p=0.9, keep_support=True, max_tokens=3, seed=0)

    done = await engine.generate((1, 2), asked, stop_token_ids=())
    small = await engine.generate((1, 2), replace(asked, top_k=10), stop_token_ids=())
    await engine.close()

    assert done.supports is None
    assert len(done.token_ids) == 3
    assert "set top_k to at most" in done.unfit_for_training(asked)
    assert small.supports is not None
    assert small.unfit_for_training(asked) == ""


async def test_a_first_step_sees_no_mismatch_and_a_ratio_of_one():
    model = tiny(dtype=torch.float32, initializer_range=0.15)
    engine, members = TransformersEngine(model), []
    for number in range(2):
        told = episode("t", number, float(number), tokens=12)
        asked = {"temperature": 0.9, "top_p": 0.8, "max_tokens": 12, "seed": number}
        sequence = await sampled(engine, (1, 2, 3), **asked)
        turns = (replace(told.turns[0], start=3),)
        members.append(replace(told, turns=turns, sequences=(sequence,)))
    await engine.close()
    trainer = trainer_of(model, dtype="float32", temperature=0.9, top_p=0.8, beta=0.01)

    metrics = trainer.step([TrajectoryGroup(tuple(members))])

    assert metrics["ratio/max"] == pytest.approx(1, abs=1e-4)
    assert metrics["mismatch/abs_max"] == pytest.approx(0, abs=1e-5)
    assert metrics["kl"] == pytest.approx(0, abs=1e-5)


class Even(ToolEnv):
    """Rewards the share of even bytes."""

    def start(self) -> str:
        return "go"

    def reward(self, answer: str) -> float:
        return sum(ord(letter) % 2 == 0 for letter in answer) / max(1, len(answer))


def test_a_tiny_model_learns_with_a_cut_distribution(tmp_path):
    settings = {"max_steps": 20, "num_generations": 8, "learning_rate": 3e-2, "top_p": 0.9}
    limits = ae.RunLimits(max_turns=1, max_tokens_per_turn=6)

    trained = prompts.trainer_of(tmp_path, envs=spec_of(Even, [{}] * 4), limits=limits, **settings)
    means = [metrics["reward"] for metrics in trained.train()]

    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.2
