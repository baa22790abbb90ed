"""On-policy distillation: the gradient is that of the reverse KL to the teacher, and the student gets closer."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import agentenv as ae
from agentenv.core import EngineError, EngineUnavailable, SequenceBuilder, TrajectoryGroup, UsageError
from agentenv.engine.vllm import connect
from agentenv.render import ChatTokenizer, byte_tokenizer
from agentenv.training import GRPOConfig, GRPOTrainer
from agentenv.training.learners.torch.learner import TorchLearner
from agentenv.training.learners.torch.reference import Teacher
from agentenv.training.loading import find_teacher
from agentenv.training.loop import save_tokenizer
from agentenv.training.served_teacher import ServedTeacher
from agentenv.training.step import GRPO
from helpers.model_server import model_server
from helpers.training import episode, group, loss_of, make_row, tiny
from scenes import TOKENIZER, numbered, saved_model

DISTILL = GRPOConfig(loss_type="distill", teacher="given")


def test_the_expected_gradient_is_that_of_the_reverse_kl():
    torch.manual_seed(0)
    logits = torch.randn(3, 11, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(3, 11, dtype=torch.float64).log_softmax(-1)
    student = logits.log_softmax(-1)
    # Every token once, weighted by its probability, is the expectation over what the student samples.
    loss = loss_of(
        student.flatten(),
        student.detach().flatten(),
        torch.randn(33, dtype=torch.float64),
        student.detach().exp().flatten(),
        ref_logprobs=teacher.flatten(),
        loss_type="distill",
        teacher="given",
    ).loss
    (ours,) = torch.autograd.grad(loss, logits)

    student = logits.log_softmax(-1)
    kl = torch.nn.functional.kl_div(teacher, student, reduction="sum", log_target=True)
    (truth,) = torch.autograd.grad(kl, logits)
    assert (ours - truth).abs().max() <= 1e-12


def test_what_older_weights_sampled_is_weighted_by_the_ratio():
    old, lp, ref = (torch.tensor([value], dtype=torch.float64) for value in (-2.0, -1.5, -1.0))
    lp.requires_grad_()
    loss_of(lp, old, ref_logprobs=ref, loss_type="distill", teacher="given").loss.backward()

    assert lp.grad is not None
    assert lp.grad.item() == pytest.approx(-torch.tensor(0.5).exp().item() * 0.5)


def sampled(model, task: int, generator: torch.Generator) -> TrajectoryGroup:
    """One episode of four tokens that the model samples."""
    prompt = [task + 1, 7, 3]
    ids, logprobs = list(prompt), []
    for _ in range(4):
        with torch.no_grad():
            found = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
        token = int(torch.multinomial(found.exp(), 1, generator=generator))
        logprobs.append(float(found[token]))
        ids.append(token)
    builder = SequenceBuilder()
    builder.append("prompt", prompt)
    builder.append("model", ids[3:], logprobs=logprobs, weights_version=0, turn=0)
    one = episode(f"{task}", 0, 0.0, tokens=4)
    turns = (replace(one.turns[0], start=3),)
    return TrajectoryGroup((replace(one, turns=turns, sequences=(builder.freeze(),)),))


def test_the_student_gets_closer_to_the_teacher_without_any_reward(tmp_path):
    tiny(1, torch.float32).save_pretrained(tmp_path)
    student = tiny(0, torch.float32)
    options = {"loss_type": "distill", "teacher": str(tmp_path), "learning_rate": 2e-2, "dtype": "float32"}
    trainer = GRPOTrainer(GRPOConfig(**options), model=student)
    generator = torch.Generator().manual_seed(0)
    steps = [trainer.step([sampled(student, task % 8, generator) for task in range(16)]) for _ in range(12)]

    distances = [step["kl"] for step in steps]
    assert sum(distances[-2:]) / 2 < 0.6 * distances[0]
    assert all(step["tokens/trained"] == 64 for step in steps)


def test_a_group_without_spread_is_trained_and_the_teacher_stays_as_it_was():
    teacher = tiny(1)
    before = [one.detach().clone() for one in teacher.parameters()]
    learner = TorchLearner(tiny(0), DISTILL, teacher=teacher)
    batch = GRPO(learner, DISTILL).batch([group("a", [1.0, 1.0])])

    assert len(batch.rows) == 2
    with torch.no_grad():
        for row, ref_n in zip(batch.rows, learner.reference.score(batch.rows), strict=True):
            logits = teacher(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
            ids = torch.tensor(row.token_ids)
            truth = logits[row.positions_n - 1, ids[row.positions_n]]
            assert (ref_n - truth).abs().max() <= 1e-6
    assert all(torch.equal(one, old) for one, old in zip(teacher.parameters(), before, strict=True))
    assert not any(one.requires_grad for one in teacher.parameters())


def test_rows_that_do_not_fit_the_teacher_are_refused():
    config = GRPOConfig(loss_type="distill", teacher="given")
    small = Teacher(tiny(1, vocab_size=20, max_position_embeddings=16), config)

    with pytest.raises(UsageError, match="token id 30 is outside the teacher's vocabulary of 20"):
        small.score([make_row([1, 30, 2], [2])])
    with pytest.raises(UsageError, match="longer than the 16 of the teacher"):
        small.score([make_row([1] * 17, [2])])


def test_a_teacher_has_its_weights_where_the_policy_is_read_in_parts(tmp_path, monkeypatch):
    path = saved_model(tmp_path, 1)
    stored = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = GRPOConfig(loss_type="distill", teacher=path, fsdp=True, dtype="float32")

    teacher = find_teacher(config, "")

    # A model whose weights are read later has none of these numbers yet.
    assert torch.equal(teacher.lm_head.weight, stored)


def test_a_teacher_with_other_tokens_is_refused_before_anything_is_played(tmp_path):
    teacher = saved_model(tmp_path / "large", 1)
    words = (tmp_path / "large" / "tokenizer.json").read_text()
    (tmp_path / "large" / "tokenizer.json").write_text(words.replace("<|im_end|>", "<|other|>"))
    config = GRPOConfig(model=saved_model(tmp_path / "small", 0), teacher=teacher, loss_type="distill")

    with pytest.raises(UsageError, match="are not those of"):
        GRPOTrainer(config)

    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "small")
    with pytest.raises(UsageError, match="are not those of the model in training"):
        GRPOTrainer(replace(config, model=""), model=loaded, tokenizer=TOKENIZER)


# A teacher on vLLM servers gives the log-probabilities that the same model gives in the trainer's process


@pytest.fixture
def large(tmp_path):
    return saved_model(tmp_path / "large", 1, hidden_size=32, initializer_range=0.5)


def rows_of_all_kinds():
    return [
        make_row([5, 9, 14, 200, 7, 7], [3, 5]),
        make_row([30, 31], [1]),
        make_row(list(range(40)), [1, 2, 20, 39]),
    ]


@pytest.mark.parametrize("servers", [1, 2])
def test_the_servers_score_exactly_the_tokens_as_the_model_itself(large, servers):
    rows = rows_of_all_kinds()
    config = GRPOConfig(loss_type="distill", teacher=large, dtype="float32")
    expected = Teacher(find_teacher(config, ""), config).score(rows)

    with ExitStack() as stack:
        fakes = [stack.enter_context(model_server(large, tokenizer=byte_tokenizer())) for _ in range(servers)]
        teacher = ServedTeacher(",".join(f"{fake.url}/v1" for fake in fakes), byte_tokenizer())
        for fake in fakes:
            fake.seen.clear()
        scored = teacher.score(rows)
        assert teacher.score([]) == []
        sent = sorted(body["prompt"] for fake in fakes for body in fake.seen)

    assert sent == sorted(list(row.token_ids) for row in rows)
    for row, ours, truth in zip(rows, scored, expected, strict=True):
        assert ours.shape == row.positions_n.shape
        assert (ours - truth).abs().max() <= 1e-5


def test_a_run_with_a_served_teacher_is_that_of_the_model_in_the_process(large, tmp_path):
    small = saved_model(tmp_path / "small", 0, initializer_range=0.5)

    def run(teacher: str) -> dict[str, float]:
        result = ae.train(
            numbered(count=4),
            small,
            steps=1,
            group_size=1,
            demos="none",
            runs_dir=tmp_path / "runs",
            limits={"max_turns": 1, "max_tokens_per_turn": 6},
            loss_type="distill",
            teacher=teacher,
            dtype="float32",
        )
        return dict(result.history[0])

    here = run(large)
    with model_server(large, tokenizer=byte_tokenizer()) as server:
        there = run(f"{server.url}/v1")

    assert here["kl"] > 0
    for name in ("kl", "loss", "grad_norm", "tokens/trained"):
        assert there[name] == pytest.approx(here[name], rel=1e-3)


def test_a_server_that_is_busy_is_asked_again_and_other_failures_are_errors(large):
    with model_server(large, tokenizer=byte_tokenizer()) as server:
        teacher = ServedTeacher(server.url, byte_tokenizer())
        server.plan = [503, 429]
        assert len(teacher.score([make_row([5, 9, 14], [2])])) == 1
        for fault, said in ((400, "fault 400"), ("empty", "did not score"), ("other ids", "did not score")):
            server.plan = [fault]
            with pytest.raises(EngineError, match=said):
                teacher.score([make_row([5, 9, 14], [2])])


def test_the_key_of_the_servers_is_read_from_the_environment(large, monkeypatch):
    with model_server(large, tokenizer=byte_tokenizer(), key="secret") as server:
        monkeypatch.delenv("VLLM_API_KEY", raising=False)
        with pytest.raises(EngineError, match="401"):
            ServedTeacher(server.url, byte_tokenizer())
        monkeypatch.setenv("VLLM_API_KEY", "secret")

        scored = ServedTeacher(server.url, byte_tokenizer()).score([make_row([5, 9, 14], [2])])
        assert connect(server.url, tokenizer=large)[0].name == f"{server.url}/v1"

    assert len(scored) == 1


def test_a_row_that_leaves_the_server_no_room_is_refused(large):
    with model_server(large, tokenizer=byte_tokenizer()) as server:
        teacher = ServedTeacher(server.url, byte_tokenizer())
        teacher.score([make_row([1] * 511, [2])])

        with pytest.raises(UsageError, match="a row of 512 tokens is longer than the 511") as refused:
            teacher.score([make_row([1] * 512, [2])])
    assert "max_context_tokens to 511" in (refused.value.remedy or "")


def other_tokenizer(path) -> ChatTokenizer:
    save_tokenizer(byte_tokenizer(), path)
    words = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(words.replace("<|im_end|>", "<|other|>"))
    return ChatTokenizer.load(path)


def test_a_server_with_other_tokens_is_refused_before_anything_is_played(large, tmp_path):
    (tmp_path / "other").mkdir()
    options = {"model": saved_model(tmp_path / "small", 0, initializer_range=0.5), "loss_type": "distill"}
    other = other_tokenizer(tmp_path / "other")
    with model_server(large, tokenizer=other) as server, pytest.raises(UsageError, match="are not those of"):
        GRPOTrainer(GRPOConfig(teacher=f"{server.url}/v1", **options))
    with model_server(large) as server, pytest.raises(UsageError, match="cannot be compared"):
        GRPOTrainer(GRPOConfig(teacher=f"{server.url}/v1", **options))
    with pytest.raises(EngineUnavailable, match="does not answer"):
        GRPOTrainer(GRPOConfig(teacher="http://127.0.0.1:9/v1", **options))
