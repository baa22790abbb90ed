"""No step on a server is lost or made twice, whatever call fails; what it cannot do is refused."""

from __future__ import annotations

import copy
import json
from fnmatch import fnmatch

import pytest
import torch

from agentenv.core import EngineError, TrainingFailed, UsageError
from agentenv.render import ChatTokenizer
from agentenv.training import GRPOConfig, LoraOptions
from agentenv.training.metrics import Meter
from agentenv.training.step import GRPO
from agentenv_tinker import Spent, Traits, probe
from agentenv_tinker.engine import load_tokenizer
from agentenv_tinker.probe import known_traits
from agentenv_tinker.refuse import refuse_unable
from agentenv_tinker.service import parse_model
from helpers.chat_cases import TOKENIZERS
from helpers.training import group

GROUPS = [group("a", [1.0, 0.0]), group("bcd", [0.0, 1.0])]


class Sampler:
    """An engine that is told of weights."""

    def __init__(self) -> None:
        self.weights_version, self.failures, self.versions = 0, 0, []

    def use(self, client, version) -> None:
        self.client, self.weights_version = client, version
        self.versions.append(version)


def trained(learner, steps: int = 3, **options) -> dict[str, torch.Tensor]:
    """Make steps as the loop does, and return the adapters."""
    grpo, engine = GRPO(learner, learner.config), Sampler()
    for _ in range(steps):
        metrics, _ = grpo.step(copy.deepcopy(GROUPS))
        assert metrics["updates"] == learner.config.num_minibatches
        learner.bring(engine)
    assert engine.versions == [learner.config.num_minibatches * (n + 1) for n in range(steps)]
    weights = {n: p.detach().clone() for n, p in learner._client.model.named_parameters() if p.requires_grad}
    sampled = dict(engine.client.model.named_parameters())
    assert all(torch.equal(sampled[name], value) for name, value in weights.items())
    return weights


def test_an_answer_that_is_lost_after_the_step_makes_no_second_step(server, learner_of):
    wanted = trained(learner_of(), 2)
    for call in ("forward_backward", "optim_step"):
        lost = iter([False, True, *[False] * 9])
        server.fault = lambda name, _, call=call, lost=lost: "after" if name == call and next(lost) else ""
        found = trained(learner_of(), 2)
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), call


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_fault_at_any_call_changes_nothing(server, learner_of, when):
    wanted = trained(learner_of(num_minibatches=2), 2)
    number = server.calls
    assert number > 15
    for failing in range(1, number + 1):
        server.calls = 0
        server.fault = lambda call, count, failing=failing: when if count == failing else ""
        found = trained(learner_of(num_minibatches=2), 2)
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), failing


def test_several_faults_in_a_row_are_outlasted_and_a_dead_server_is_an_error(server, learner_of):
    wanted = trained(learner_of())
    server.calls = 0
    server.fault = lambda call, count: "after" if 8 <= count <= 12 else ""
    found = trained(learner_of())
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    learner = learner_of()
    trained(learner, 1)
    server.alive = False
    with pytest.raises(EngineError, match="exceeded 3 retries"):
        GRPO(learner, learner.config).step(GROUPS)


def test_an_interrupted_step_is_undone_before_the_checkpoint(server, learner_of, tmp_path):
    learner = learner_of()
    wanted = trained(learner, 1)

    def interrupt(call, count):
        if call == "optim_step":
            server.fault = lambda call, count: ""
            raise KeyboardInterrupt
        return ""

    server.fault = interrupt
    with pytest.raises(KeyboardInterrupt):
        GRPO(learner, learner.config).step(GROUPS)
    (tmp_path / "checkpoint").mkdir()
    record = learner.save_files(tmp_path / "checkpoint")
    other = learner_of()
    other.load_files(json.loads(json.dumps(record)))
    found = dict(other._client.model.named_parameters())
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_checkpoint_is_an_adapter_that_peft_loads(server, learner_of, tmp_path, model):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    learner = learner_of()
    wanted = trained(learner, 2)
    (tmp_path / "checkpoint").mkdir()
    learner.save_files(tmp_path / "checkpoint")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    found = dict(PeftModel.from_pretrained(base, tmp_path / "checkpoint").named_parameters())
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_warmup_has_an_optimiser_of_its_own(server, learner_of):
    learner = learner_of()
    with learner.separate_optimizer(GRPOConfig(lora=LoraOptions(r=4))):
        rows = GRPO(learner, learner.config).batch(GROUPS).rows
        GRPO(learner, learner.config).update(rows, 1e-3, Meter())
        assert learner._client.optimizer.state
    assert not learner._client.optimizer.state
    assert server.log.count(("load",)) == 1


def test_a_step_without_a_gradient_sends_nothing(server, learner_of):
    learner = learner_of()
    metrics, _ = GRPO(learner, learner.config).step([group("a", [1.0, 1.0])])
    assert metrics["updates"] == learner.weights_version == 0
    assert ("optim_step",) not in server.log


# The probe ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "traits"),
    [
        ({}, Traits()),
        ({"reduction": "mean_mean"}, Traits(adds_tokens=False, adds_data=False)),
        ({"clips": False}, Traits(clips=False)),
        ({"keeps_samplers": False}, Traits(keeps_samplers=False)),
        ({"first_logprob": False}, Traits()),
        ({"dtype": torch.float32}, Traits()),
    ],
    ids=str,
)
def test_the_probe_finds_what_a_server_does(server, service, changes, traits):
    for name, value in changes.items():
        setattr(server, name, value)
    assert probe(service, 250) == traits


def test_a_server_whose_gradient_cannot_be_proven_is_refused(server, service):
    server.takes_eps = False
    with pytest.raises(TrainingFailed, match="no gradient on it can be proven exact"):
        probe(service, 250)


def test_findings_are_kept_for_a_day(server, service, tmp_path, monkeypatch):
    file = tmp_path / "cache" / "tinker.json"
    found = known_traits(service, 250, file)
    calls = server.calls
    assert known_traits(service, 250, file) == found
    assert server.calls == calls
    old = json.loads(file.read_text())
    old[service.identity]["at"] -= 25 * 3600
    file.write_text(json.dumps(old))
    assert known_traits(service, 250, file) == found
    assert server.calls > calls
    file.write_text("[broken")
    assert known_traits(service, 250, file) == found


# What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 5},
        {"entropy_coef": 0.1},
        {"router_replay": True},
        {"optim": "torch.optim:SGD"},
        {"lora": None},
        {"lora": LoraOptions(alpha=16)},
        {"lora": LoraOptions(dropout=0.1)},
        {"lora": LoraOptions(target_modules="q_proj")},
        {"fsdp": True},
        {"packing": "padded"},
        {"dtype": "bfloat16"},
        {"gradient_checkpointing": True},
        {"workers": 2},
        {"teacher": "smollm2", "beta": 0.1},
    ],
    ids=str,
)
def test_options_that_no_server_can_hold_are_refused(options):
    with pytest.raises(UsageError):
        refuse_unable(GRPOConfig(**{"lora": LoraOptions(), **options}), Traits(), "tinker:M")


def test_options_that_this_server_cannot_hold_are_refused():
    fine = GRPOConfig(lora=LoraOptions(r=32), max_ahead=2)
    assert refuse_unable(fine, Traits(), "tinker:M") == 32
    with pytest.raises(UsageError, match="max_ahead"):
        refuse_unable(fine, Traits(keeps_samplers=False), "tinker:M")
    with pytest.raises(UsageError, match="max_grad_norm=1e9"):
        refuse_unable(fine, Traits(clips=False), "tinker:M")


def test_model_strings_and_prices():
    assert parse_model("tinker:Qwen/Qwen3-8B") == ("Qwen/Qwen3-8B", "")
    assert parse_model("tinker:/a@b/c@https://host:8000/") == ("/a@b/c", "https://host:8000")
    for wrong in ("tinker:", "tinker:@http://host", "tinker:M@http"):
        with pytest.raises(UsageError, match="write tinker:MODEL"):
            parse_model(wrong)
    prices = {"prefilled": 0.1, "sampled": 1.0}
    spent = Spent(prefilled=3_000_000, cached=1_000_000, sampled=500_000, prices=prices)
    assert spent.metrics()["spent/cost"] == pytest.approx(0.1 * 3 + 0.5)
    with pytest.raises(UsageError, match="no price of 'gpu'"):
        Spent(prices={"gpu": 1.0})


def test_the_tokenizer_of_a_model_of_the_hub_comes_without_its_weights(monkeypatch):
    directory = TOKENIZERS / "smollm2"
    asked: list[str] = []

    def snapshot_download(model, *, allow_patterns, **_):
        asked.extend(allow_patterns)
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)

    tokenizer = load_tokenizer("owner/name")

    assert tokenizer.encode("a book") == ChatTokenizer.load(directory).encode("a book")
    wanted = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"}
    kept = {name for name in wanted if any(fnmatch(name, pattern) for pattern in asked)}
    assert kept == wanted - {"model.safetensors"}
