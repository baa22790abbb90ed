"""SkyRL's own server of the Tinker API, on the CPU: a step there is the torch learner's.

Runs in an environment that has SkyRL: `make test-skyrl`, or `.ci/install-skyrl DIR` and DIR's pytest.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import agentenv as ae
from agentenv.engine import Sampling
from agentenv.envs import EnvSpec
from agentenv.render import Renderer
from agentenv.runner import Runner
from agentenv.training import GRPOConfig, LoraOptions
from agentenv.training.step import GRPO
from helpers.skyrl_server import SkyRLServer
from helpers.training import saved_tiny

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        find_spec("skyrl") is None,
        reason=os.environ.get("NO_SKYRL", "") or "skyrl is not installed here: `make test-skyrl` installs it",
    ),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(3600),
]


class Digits(ae.ToolEnv):
    """Pays for digits, which a model that talks rarely says."""

    def start(self, n: int) -> str:
        return f"Count from {n}."

    def reward(self, answer: str) -> float:
        return sum(each.isdigit() for each in answer) / max(len(answer), 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> SkyRLServer:
    root = tmp_path_factory.mktemp("skyrl")
    server = SkyRLServer(root, saved_tiny(root / "model"))
    server.start()
    yield server
    server.kill()


async def play(engine, renderer, spec, tasks, size, seed, tokens):
    limits = ae.RunLimits(max_turns=1, max_tokens_per_turn=tokens)
    runner = Runner(engine, renderer, limits, sampling=Sampling(temperature=1.0), run_seed=seed)
    return [group async for group in runner.run_groups(spec, tasks, size)]


def learner_on(server: SkyRLServer, **options):
    """Return a learner on a server that was measured, the engine beside it, and the renderer."""
    from agentenv.training.elsewhere import open_elsewhere

    settings = {"lora": LoraOptions(r=server.rank), "max_grad_norm": 1e9, "num_generations": 4, **options}
    config = GRPOConfig(**settings)
    learner, engine, tokenizer = open_elsewhere(f"tinker:{server.model}@{server.url}", config, None, None)
    return learner, engine, Renderer(tokenizer)


def test_two_steps_change_the_adapter_as_the_torch_learner_does(tiny, tmp_path, monkeypatch):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from agentenv.training.learners.torch.learner import TorchLearner

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    learner, engine, renderer = learner_on(tiny, learning_rate=1e-2, adam_epsilon=1e-3)
    assert not learner.traits.adds_tokens
    assert not learner.traits.adds_data
    assert not learner.traits.clips
    assert not learner.traits.keeps_samplers
    learner.bring(engine)

    def adapter(name: str) -> Path:
        (tmp_path / name).mkdir()
        learner.save_files(tmp_path / name)
        return tmp_path / name

    def loaded(path: Path):
        assert (path / "adapter_config.json").exists(), "the adapter was not downloaded"
        base = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float64)
        return PeftModel.from_pretrained(base, path, is_trainable=True).eval()

    start = adapter("start")
    ours = TorchLearner(loaded(start), replace(learner.config, dtype="float64"))
    mine, theirs = GRPO(learner, learner.config), GRPO(ours, ours.config)
    spec = EnvSpec.of("skyrl/Digits-v0", Digits, tasks=[{"n": n} for n in range(2)])
    for step in range(2):
        groups = asyncio.run(play(engine, renderer, spec, list(spec.task_set()), 4, step, 8))
        assert {version for group in groups for one in group for version in one.weights_versions} == {step}
        groups = [_graded(group) for group in groups]
        told, _ = mine.step(groups)
        wanted, _ = theirs.step(groups)
        assert told["updates"] == wanted["updates"] == 1
        assert told["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
        # Server and trainer have the same weights, and so the same log-probabilities: the ratio is 1.
        assert told["mismatch/abs_max"] < 1e-4
        learner.bring(engine)
    moved, first = dict(loaded(adapter("end")).named_parameters()), dict(loaded(start).named_parameters())
    names = [name for name, value in ours.model.named_parameters() if value.requires_grad]
    there = dict(ours.model.named_parameters())
    off = sum(float((moved[name] - there[name]).detach().square().sum()) for name in names) ** 0.5
    size = sum(float((there[name] - first[name]).detach().square().sum()) for name in names) ** 0.5
    print(f"the adapters moved by {size:.3g} and differ by {off:.3g}: {off / size:.2g}")
    assert off < 1e-5 * size


def _graded(group):
    """Give the members of a group rewards that differ: random bytes hold few digits."""
    members = [replace(one, reward=number / 3) for number, one in enumerate(group)]
    return replace(group, trajectories=tuple(members))
