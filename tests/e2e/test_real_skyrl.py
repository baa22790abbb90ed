"""SkyRL's own server of the Tinker API, on the CPU: a step there is the torch learner's.

Runs in an environment that has SkyRL: `make test-skyrl`, or `.ci/install-skyrl DIR` and DIR's pytest.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import agentenv as ae
from agentenv.engine import Sampling
from agentenv.envs import EnvSpec
from agentenv.render import Renderer
from agentenv.runner import Runner
from agentenv.runs import find_run
from agentenv.runs.store import RunStatus
from agentenv.training import GRPOConfig, LoraOptions
from agentenv.training.step import GRPO
from helpers.skyrl_server import SkyRLServer
from helpers.training import saved_tiny
from helpers.waiting import wait_until

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
    from agentenv_tinker import training

    settings = {"lora": LoraOptions(r=server.rank), "max_grad_norm": 1e9, "num_generations": 4, **options}
    config = GRPOConfig(**settings)
    learner, engine, tokenizer = training.open(f"tinker:{server.model}@{server.url}", config, None, None)
    return learner, engine, Renderer(tokenizer)


def saved(learner, path: Path) -> Path:
    """Write the adapter that the server has to a new directory."""
    path.mkdir()
    learner.save_files(path)
    return path


def with_adapter(server: SkyRLServer, path: Path):
    """Return the server's model with an adapter, on this machine."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert (path / "adapter_config.json").exists(), "the adapter was not downloaded"
    base = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float64)
    return PeftModel.from_pretrained(base, path, is_trainable=True).eval()


def distance(start, here, there) -> float:
    """Return by how much two adapters differ, as a share of the way from a start to the first of them."""
    first, moved, other = (dict(model.named_parameters()) for model in (start, here, there))
    names = [name for name, value in moved.items() if value.requires_grad]
    off = sum(float((other[name] - moved[name]).detach().square().sum()) for name in names) ** 0.5
    size = sum(float((moved[name] - first[name]).detach().square().sum()) for name in names) ** 0.5
    print(f"the adapters moved by {size:.3g} and differ by {off:.3g}: {off / size:.2g}")
    return off / size


def test_two_steps_change_the_adapter_as_the_torch_learner_does(tiny, tmp_path, monkeypatch):
    from agentenv.training.learners.torch.learner import TorchLearner

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    learner, engine, renderer = learner_on(tiny, learning_rate=1e-2, adam_epsilon=1e-3)
    assert not learner.traits.adds_tokens
    assert not learner.traits.adds_data
    assert not learner.traits.clips
    assert not learner.traits.keeps_samplers
    learner.bring(engine)
    start = saved(learner, tmp_path / "start")
    ours = TorchLearner(with_adapter(tiny, start), replace(learner.config, dtype="float64"))
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
    end = with_adapter(tiny, saved(learner, tmp_path / "end"))
    assert distance(with_adapter(tiny, start), ours.model, end) < 1e-5


def _graded(group):
    """Give the members of a group rewards that differ: random bytes hold few digits."""
    members = [replace(one, reward=number / 3) for number, one in enumerate(group)]
    return replace(group, trajectories=tuple(members))


VARIETY = """
import agentenv as ae

class Variety(ae.ToolEnv):
    "Pays for different characters."

    def start(self, n: int) -> str:
        return f"say {n}"

    def reward(self, answer: str) -> float:
        return len(set(answer)) / 10

ae.register("skyrl/Variety-v0", Variety, tasks=[{"n": n} for n in range(4)])
"""
STEPS = 6


@pytest.mark.parametrize("dies", ["server", "driver"])
def test_a_training_outlasts_three_deaths_and_makes_each_step_once(dies, tiny, tmp_path, monkeypatch):
    from agentenv.training.learners.torch.learner import TorchLearner

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = {"learning_rate": 1e-2, "adam_epsilon": 1e-3, "groups_per_step": 2, "max_steps": STEPS}
    learner, _, _ = learner_on(tiny, **options)
    start = saved(learner, tmp_path / "start")  # the adapter that belongs to the seed
    learner._service.close()
    (tmp_path / "variety.py").write_text(VARIETY)
    given = {**options, "lora.r": tiny.rank, "max_grad_norm": 1e9, "max_turns": 1, "max_tokens_per_turn": 8}
    given["save_steps"] = 1
    words = ["variety.py", "-m", f"tinker:{tiny.model}@{tiny.url}", "-k", "4", "--demos", "none"]
    words += [word for name, value in given.items() for word in ("-o", f"{name}={value}")]

    def agentenv(*words: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "said").open("ab") as said:
            command = [sys.executable, "-m", "agentenv", *words]
            return subprocess.Popen(command, cwd=tmp_path, stdout=said, stderr=said)

    training = agentenv("train", *words, "--steps", str(STEPS))
    requests = tiny.root / "server.log"
    for step, more in ((1, 0), (2, 2_000), (4, 6_000)):
        # Before the first step the server is measured, and one that dies then is an error.
        name = f"runs/*/checkpoints/step-{step}"
        wait_until(
            lambda now=training, name=name: now.poll() is not None or [*tmp_path.glob(name)], seconds=1200
        )
        size = requests.stat().st_size + more  # so that what is done at the kills differs
        wait_until(lambda size=size: requests.stat().st_size >= size, seconds=1200)
        assert training.poll() is None, (tmp_path / "said").read_text()
        if dies == "server":
            tiny.kill()
            tiny.start()
        else:
            training.kill()
            training.wait()
            training = agentenv("train", "--resume", "last")
    assert training.wait(timeout=1200) == 0, (tmp_path / "said").read_text()

    run = find_run("last", tmp_path / "runs")
    assert run.status is RunStatus.FINISHED
    metrics = run.metrics()
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert [row["weights_version"] for row in metrics] == list(range(1, STEPS + 1))
    assert {member for _, member in Counter((one.group_id, one.member) for one in run.summaries).items()} == {
        1
    }
    # The episodes of the run, trained here once and in their order, lead to the adapter of the server.
    ours = TorchLearner(with_adapter(tiny, start), replace(learner.config, dtype="float64"))
    grpo, step_of = GRPO(ours, ours.config), run.annotations()
    batches: dict[int, list[ae.TrajectoryGroup]] = {}
    for group in run.groups():
        steps = {step_of.get(f"{one.group_id}#{one.member}", {}).get("step") for one in group}
        batches.setdefault((steps - {None}).pop(), []).append(group)
    for step in range(1, STEPS + 1):
        grpo.step(batches[step])
    there = with_adapter(tiny, run.path / "checkpoints" / f"step-{STEPS}")
    assert distance(with_adapter(tiny, start), ours.model, there) < 1e-4

    assert agentenv("doctor", "last").wait(timeout=300) == 0, (tmp_path / "said").read_text()
    assert agentenv("view", "last", "--output", "page.html", "--no-browser").wait(timeout=300) == 0
    assert "Variety" in (tmp_path / "page.html").read_text()


def test_smollm2_learns(tmp_path, monkeypatch):
    from agentenv.engine import load_engine
    from agentenv.training.loop import save_tokenizer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = load_engine("smollm2", dtype="float32")
    loaded.engine.model.save_pretrained(tmp_path / "smollm2")
    save_tokenizer(loaded.tokenizer, tmp_path / "smollm2")
    server = SkyRLServer(tmp_path, str(tmp_path / "smollm2"), sequences=16)
    server.start()
    try:
        learner, engine, renderer = learner_on(server, learning_rate=1e-3)
        spec = EnvSpec.of("skyrl/Digits-v0", Digits, tasks=[{"n": n} for n in range(2)])
        grpo, rewards = GRPO(learner, learner.config), []
        for step in range(5):
            learner.bring(engine)
            groups = asyncio.run(play(engine, renderer, spec, list(spec.task_set()), 8, step, 8))
            rewards.append(sum(one.reward for group in groups for one in group) / 16)
            grpo.step(groups)
    finally:
        server.kill()
    print(f"shares of digits: {rewards}")
    assert rewards[-1] > rewards[0] + 0.3
