"""Verbs that execute what a run names say so, and ask for `--trust` where somebody else made the run."""

from __future__ import annotations

import json

import pytest

from agentenv import train
from agentenv.core import UsageError
from agentenv.envs import registry
from agentenv.runs.store import RunStatus, RunWriter, find_run
from agentenv.runs.store.trust import executed_files, is_own

PLAYED = ("-m", "scripted:1", "-n", "1", "--json")


@pytest.fixture
def stolen(adder, command, tmp_path, monkeypatch):
    """A finished evaluation that another user made, whose environment file was not executed here yet."""
    file = tmp_path / adder
    file.write_text(f"{file.read_text()}\nfrom pathlib import Path\nPath('executed').touch()\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    assert command("eval", adder, *PLAYED).code == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    registry.remove("cli/Adder-v0")
    (tmp_path / "executed").unlink()
    file.write_text(f"{file.read_text()}\n# changed\n")  # a new file, so that it is executed again
    return tmp_path


@pytest.fixture
def unfinished_training(tmp_path, monkeypatch):
    """Make a training of another user that did not end."""

    def make(config: dict[str, object]) -> None:
        with RunWriter.create("x", kind="train", run_id="a-run", config=config) as writer:
            writer.close(RunStatus.INTERRUPTED)

    return make


@pytest.mark.parametrize("words", [("eval", "--resume", "last", "--resume-anyway"), ("replay", "last#0")])
def test_the_file_of_a_run_of_another_user_is_executed_with_trust_only(stolen, words, command):
    refused = command(*words)
    assert refused.code == 2
    assert not (stolen / "executed").exists()
    assert "--trust" in refused.err
    assert str(stolen / "adder.py") in refused.err

    trusted = command(*words, "--trust")
    assert trusted.code == 0
    assert (stolen / "executed").exists()
    assert f"executes {stolen / 'adder.py'}" in trusted.err


def test_a_replay_in_an_environment_that_the_user_names_needs_no_trust(stolen, command):
    assert command("replay", "last#0", "--env", "adder.py").code == 0
    branched = command("replay", "last#0", "--env", "adder.py", "--from-turn", "0")
    assert branched.code == 2
    assert "--trust" in branched.err


@pytest.mark.parametrize("words", [(), ("--from-turn", "0", "-k", "1", "-m", "mock")])
@pytest.mark.parametrize("part", ["parts.py:Tail", {"name": "parts.py:Tail"}])
def test_a_part_of_the_runner_that_a_run_names_needs_trust_in_any_environment(stolen, words, part, command):
    (stolen / "parts.py").write_text("from pathlib import Path\nPath('executed').touch()\ndef Tail(): ...\n")
    file = find_run("last").path / "run.json"
    data = json.loads(file.read_text())
    data["config"]["runner"]["user"] = part
    file.write_text(json.dumps(data))

    said = command("replay", "last#0", "--env", "agentenv/Calculator-v0", *words)

    assert said.code == 2
    assert "--trust" in said.err
    assert not (stolen / "executed").exists()


@pytest.mark.parametrize(
    "config",
    [{"train": {"rollout": "mine.py:play"}}, {"demos": "policy:mine.py:show"}],
    ids=["rollout", "demos"],
)
def test_a_file_that_a_training_names_is_told_and_means_another_file_elsewhere(
    tmp_path, monkeypatch, unfinished_training, config
):
    (tmp_path / "elsewhere").mkdir()
    unfinished_training(config)
    info = find_run("a-run").info

    assert executed_files(info.config) == [str(tmp_path / "mine.py")]
    assert is_own(info)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert not is_own(info)


def test_an_own_run_is_resumed_and_says_what_it_executes(stolen, command):
    command("eval", "adder.py", *PLAYED)
    run = find_run("last").id
    said = command("eval", "--resume", run, "--json")

    assert said.code == 0
    assert f"resuming {run} executes {stolen / 'adder.py'}" in said.err


def test_a_training_of_another_user_is_not_resumed(tmp_path, monkeypatch, unfinished_training, command):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    unfinished_training({"envs": {"say.py": 1.0}})
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))

    refused = command("train", "--resume", "a-run")
    trusted = command("train", "--resume", "a-run", "--trust")

    assert (refused.code, trusted.code) == (2, 2)
    assert "--trust" in refused.err
    assert "no checkpoint to resume from" in trusted.err
    with pytest.raises(UsageError, match="trust=True"):
        train(resume="a-run")
