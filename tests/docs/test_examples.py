"""Every example runs, shows what it promises, and is listed on the page of examples."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from agentenv.core import Context
from agentenv.envs import spec
from helpers.chat_server import chat_server
from helpers.model_server import model_server

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs" / "examples.md"
"""The one page that lists the examples."""
AGENTS = sorted((EXAMPLES / "agents").glob("*.py"))
"""Agents of other SDKs; tests/unit/endpoint/test_agent_sdks.py plays those whose SDK is installed."""
SHOWS = {
    "condense": ["condensed 2 times, reward 1.0"],
    "done_policy": ["stop: 1 turns", "explain: 2 turns", "of assistant: I have opened the door."],
    "environment": ["oracle: mean reward 1.00", "random: mean reward 0.00", "tool: 1886", "You pay 1886."],
    "failing_run": [
        "error, 'env: FileNotFoundError: invoices/3.csv'",
        "env: FileNotFoundError: invoices/3.csv (",
        "in 1 episodes tool output was shortened",
        "assistant: It is 100.",
    ],
    "function_user": ["We are 4.", "Thank you, goodbye.", "reward 1.0, ended by user_done"],
    "group_policy": ["shrink: 3 usable members, 1 failed", "refill: 4 usable members, 2 failed"],
    "judge": ["{'clear': 0.9}, reward 0.95", "{'clear': 0.9}, reward 0.45", "the judge gave 2 scores"],
    "library_desk": ["oracle: mean reward 1.00", "random: mean reward 0."],
    "long_documents": ["without a condenser: context_length", "block 7 again: Passage 7", "reward 1.0"],
    "long_outputs": ["characters cut", "all 7906 characters are in", "reward 1.0"],
    "model_user": ["This kettle leaks.", "reward 1.0, ended by user_done"],
    "repair_json": ["Strict: 'the call is not valid JSON", "Lenient: '5', repaired: True"],
    "router": ["2 tokens to train on", "0 tokens to train on, last span by 'other'", "answered 1 of 2"],
    "score": ["before: first 0.", "stage I: first 0.", "stage II: first 0.", "right to wrong"],
    "tool": ["-> 6.00 EUR", "should be 'EUR' or 'USD', got", "lamp is not sold here", "3 checks, 0 problems"],
    "snapshots": ["from 1, 3 steps: at 4, reward 1.0", "from 1, 4 steps: at 5, reward 0.0"],
}
"""Lines of each example's output; the demo, its environment and its plot have tests of their own."""
NEEDS_MORE = {
    "evaluate_api",
    "one_gpu",
    "pictures",
    "self_play",
    "train_trl_class",
    "trl_trains_ours",
    "verifiers_port",
    "workers",
}
"""Examples that need a server, a model, a package or half a minute; each has a test of its own below."""
ARGUMENTS = {"score": ["2", "1", "0"]}
"""Arguments with which an example takes little time."""
SLOW = {"score": pytest.mark.slow}
WHOLE_ENVIRONMENTS = {"library_desk", "pictures"}
"""Examples of a whole environment or with a model of their own, which are longer than those of one thing."""


@pytest.fixture
def shown_by(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Give a function that runs an example in an empty folder and returns what it prints."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr("sys.argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in SHOWS])
def test_an_example_runs_and_shows_what_it_is_for(name: str, shown_by):
    if name == "repair_json":
        pytest.importorskip("json_repair", reason="needs the repair extra")

    shown = shown_by(name, *ARGUMENTS.get(name, []))

    assert [line for line in SHOWS[name] if line not in shown] == []


def test_a_model_behind_an_api_is_evaluated_with_its_cost(shown_by, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with chat_server() as url:
        shown = shown_by("evaluate_api", "local", url, "6")

    assert "tools    calculator 12 calls" in shown
    assert "cost $0.001" in shown
    assert "an episode costs 0.0090 cents" in shown
    assert "was answered '7'" in shown


@pytest.mark.slow
def test_a_tiny_model_that_sees_is_made_taught_and_trained(shown_by):
    shown = shown_by("pictures", "tiny", "1", "0", "5")

    assert "held out: 0.000 untouched" in shown
    assert re.search(r"held out: \d\.\d+ after 1 steps of GRPO", shown)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_a_tiny_model_learns_to_see(shown_by, seed: str):
    shown = shown_by("pictures", "tiny", "20", seed)

    untouched, taught, trained = map(float, re.findall(r"held out: (\d\.\d+)", shown))
    assert untouched < 0.25  # a quarter of the guesses are right
    assert taught > 0.85
    assert trained > 0.9


@pytest.mark.exhaustive
def test_by_self_play_a_tiny_model_becomes_harder_to_exploit(shown_by):
    shown = shown_by("self_play", "20", "2")

    exploited = [float(found) for found in re.findall(r"exploitability (\d\.\d+)", shown)]
    valid = [float(found) for found in re.findall(r"at least (\d+\.\d)%", shown)]
    assert len(exploited) == len(valid) == 21
    assert fmean(exploited[-5:]) < min(0.29, exploited[0])  # a player who always bets has 0.33
    assert min(valid) > 95


@pytest.mark.slow
def test_the_example_for_one_gpu_trains_on_a_server_as_well(shown_by, tiny_model: str):
    with model_server(tiny_model) as server:
        shown = shown_by("one_gpu", tiny_model, "1", server.url, "6")

    assert "step 1: reward 0." in shown
    assert "sync " in shown
    assert len(server.sampled) >= 64


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "more"), [("train_trl_class", ["6"]), ("trl_trains_ours", [])])
def test_classes_for_trl_are_trained_here_and_ours_by_trl(
    name: str, more: list[str], shown_by, tiny_model: str, monkeypatch: pytest.MonkeyPatch
):
    if name == "trl_trains_ours":
        pytest.importorskip("trl", reason="TRL is not installed")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    shown = shown_by(name, tiny_model, "2", *more)

    assert "step 1: reward 0." in shown
    assert "step 2: reward 0." in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "ray", [(), pytest.param(("local",), marks=pytest.mark.exhaustive)], ids=["processes", "ray"]
)
def test_workers_play_the_same_episodes(ray: tuple[str, ...], tmp_path: Path):
    if ray and importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed (pip install 'agentenv-rl[ray]')")
    path = str(EXAMPLES / "workers.py")  # in a process of its own, whose main module the workers import

    command = [sys.executable, path, "2", *ray]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert "2 workers: 24 episodes" in done.stdout, done.stderr
    assert "the same episodes: True" in done.stdout


def test_every_example_is_listed_and_tried():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    listed = PAGE.read_text()

    assert [name for name in sorted(names) if f"`{name}.py`" not in listed] == []
    assert names - {"demo", "plot_demo", "shelves"} == SHOWS.keys() | NEEDS_MORE


def test_the_page_of_examples_names_files_that_exist():
    named = re.findall(r"`([\w/]+\.(?:py|ipynb))`", PAGE.read_text())

    assert len(named) >= 25
    assert [name for name in named if not (EXAMPLES / name).exists()] == []


def test_every_agent_is_listed_and_short():
    page = PAGE.read_text()

    for path in AGENTS:
        assert f"`agents/{path.name}`" in page
        assert len(path.read_text().splitlines()) <= 60


@pytest.mark.parametrize("program", ["claude", "codex"])
async def test_the_agents_that_are_programs_are_started_in_their_workspace(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stand_in = tmp_path / program
    stand_in.write_text('#!/bin/sh\ncd "$PWD" && sed -i "s/return .*/return a + b/" add.py\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (path,) = [path for path in AGENTS if program in path.name]
    entry = spec(str(path))
    env = entry.make()

    await env.begin({"wrong": "a - b"}, seed=0, context=Context())
    await env.run_agent("http://127.0.0.1:1/s/x")

    assert (await env.end("final_answer")).reward == 1.0
    await env.shutdown()


@pytest.mark.parametrize("name", sorted((SHOWS.keys() | NEEDS_MORE) - WHOLE_ENVIRONMENTS))
def test_an_example_is_short(name: str):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60
