"""A fake server, a service on it, and a learner."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("tinker")

from agentenv.training import GRPOConfig, LoraOptions
from agentenv_tinker import Service, TinkerLearner, Traits, learner
from agentenv_tinker import service as service_module
from helpers.fake_tinker import Server
from helpers.training import saved_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return saved_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def server(model, tmp_path, monkeypatch):
    """A server of the documented behaviour; a test may change it before the first call."""
    import tinker

    found = Server(tmp_path, model, dtype=torch.float64)
    monkeypatch.setattr(tinker, "ServiceClient", found.ServiceClient)
    monkeypatch.setattr(service_module, "check_answers", lambda name, url: None)  # it has no address
    monkeypatch.setattr(learner, "WAITS_S", (0.0,) * 6)
    return found


@pytest.fixture
def service(server, model) -> Service:
    return Service(model, "http://127.0.0.1:1")


@pytest.fixture
def learner_of(service):
    def make(traits: Traits | None = None, **options) -> TinkerLearner:
        settings = {"lora": LoraOptions(r=4), "max_grad_norm": 1e9, "learning_rate": 1e-2, **options}
        return TinkerLearner(service, GRPOConfig(**settings), traits=traits or Traits(), vocab_size=300)

    return make


@pytest.fixture(autouse=True)
def _the_torch_learner_is_not_checked(monkeypatch):
    """Its own tests check it, which takes most of the time of a comparison."""
    from agentenv.training.learners.torch.policy import Policy

    monkeypatch.setattr(Policy, "check", lambda self: [])
