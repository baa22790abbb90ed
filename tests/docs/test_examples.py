"""Every example runs, shows what it promises, and is listed in the examples' README."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

from agentenv.core import Context
from agentenv.envs import registry, spec

EXAMPLES = Path(__file__).parents[2] / "examples"
AGENTS = sorted((EXAMPLES / "agents").glob("*.py"))
"""Agents of other SDKs; tests/unit/endpoint/test_agent_sdks.py plays those whose SDK is installed."""
SHOWS = {
    "condense": ["condensed 2 times, reward 1.0"],
    "done_policy": ["stop: 1 turns", "explain: 2 turns", "of assistant: I have opened the door."],
    "function_user": ["We are 4.", "Thank you, goodbye.", "reward 1.0, ended by user_done"],
    "group_policy": ["shrink: 3 usable members, 1 failed", "refill: 4 usable members, 2 failed"],
    "library_desk": ["oracle: mean reward 1.00", "random: mean reward 0."],
    "long_documents": ["without a condenser: context_length", "block 7 again: Passage 7", "reward 1.0"],
    "long_outputs": ["characters cut", "all 7906 characters are in", "reward 1.0"],
    "model_user": ["This kettle leaks.", "reward 1.0, ended by user_done"],
    "repair_json": ["Strict: 'the call is not valid JSON", "Lenient: '5', repaired: True"],
    "router": ["2 tokens to train on", "0 tokens to train on, last span by 'other'", "answered 1 of 2"],
    "score": ["before: first 0.", "stage I: first 0.", "stage II: first 0.", "right to wrong"],
    "snapshots": ["from 1, 3 steps: at 4, reward 1.0", "from 1, 4 steps: at 5, reward 0.0"],
}
"""Lines of each example's output; the demo and its plot have tests of their own."""
ARGUMENTS = {"score": ["2", "1", "0"]}
"""Arguments with which an example takes little time."""
SLOW = {"score": pytest.mark.slow}
WHOLE_ENVIRONMENTS = {"library_desk"}
"""Examples of a whole environment, which are longer than those that show one thing."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in SHOWS])
def test_an_example_runs_and_shows_what_it_is_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    if name == "repair_json":
        pytest.importorskip("json_repair", reason="needs the repair extra")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [name, *ARGUMENTS.get(name, [])])

    before = dict(registry)
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:  # another test may load the same file
        registry.clear()
        registry.update(before)

    shown = capsys.readouterr().out
    assert [line for line in SHOWS[name] if line not in shown] == []


def test_every_example_is_listed_and_tried():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    listed = (EXAMPLES / "README.md").read_text()

    assert [name for name in sorted(names) if f"[{name}.py]({name}.py)" not in listed] == []
    assert names - {"demo", "plot_demo"} == set(SHOWS)


def test_every_agent_is_listed_and_short():
    page = (EXAMPLES / "README.md").read_text()

    for path in AGENTS:
        assert f"[{path.name}](agents/{path.name})" in page
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


@pytest.mark.parametrize("name", sorted(SHOWS.keys() - WHOLE_ENVIRONMENTS))
def test_an_example_is_short(name: str):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60
