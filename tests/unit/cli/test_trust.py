"""Verbs that execute what a run names say so, and ask for `--trust` where somebody else made the run."""

from __future__ import annotations

import json

import pytest

from agentenv import train
from agentenv.cli import main
from agentenv.core import UsageError
from agentenv.envs import registry
from agentenv.runs.store import RunStatus, RunWriter, find_run
from agentenv.runs.store.trust import executed_files, is_own

ENV = """
from pathlib import Path

import agentenv as ae

Path("executed").touch()


class Say(ae.ToolEnv):
    def start(self, word: str) -> str:
        return f"Say {word}."

    def reward(self, answer: str, word: str) -> float:
        return float(answer == word)


ae.register("trust/Say-v0", Say, tasks=[{"word": "pear"}])
"""


def code_of(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    return left.value.code


@pytest.fixture
def stolen(tmp_path, monkeypatch):
    """A finished evaluation that another user made, whose environment file was not executed here yet."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "say.py").write_text(ENV)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    assert code_of("eval", "say.py", "-m", "scripted:pear", "-n", "1", "--json") == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    registry.remove("trust/Say-v0")
    (tmp_path / "executed").unlink()
    # A new file, so that it is executed again.
    (tmp_path / "say.py").write_text(f"{ENV}\n# changed\n")
    yield tmp_path
    if "trust/Say-v0" in registry:
        registry.remove("trust/Say-v0")


@pytest.mark.parametrize("words", [("eval", "--resume", "last", "--resume-anyway"), ("replay", "last#0")])
def test_the_file_of_a_run_of_another_user_is_executed_with_trust_only(stolen, words, capsys):
    capsys.readouterr()

    assert code_of(*words) == 2
    told = capsys.readouterr().err
    assert not (stolen / "executed").exists()
    assert "--trust" in told
    assert str(stolen / "say.py") in told

    assert code_of(*words, "--trust") == 0
    assert (stolen / "executed").exists()
    assert f"executes {stolen / 'say.py'}" in capsys.readouterr().err


def test_a_replay_in_an_environment_that_the_user_names_needs_no_trust(stolen, capsys):
    assert code_of("replay", "last#0", "--env", "say.py") == 0
    assert code_of("replay", "last#0", "--env", "say.py", "--from-turn", "0") == 2
    assert "--trust" in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("--from-turn", "0", "-k", "1", "-m", "mock")])
@pytest.mark.parametrize("part", ["parts.py:Tail", {"name": "parts.py:Tail"}])
def test_a_part_of_the_runner_that_a_run_names_needs_trust_in_any_environment(stolen, words, part, capsys):
    (stolen / "parts.py").write_text(
        "from pathlib import Path\nPath('executed').touch()\n\ndef Tail(): ...\n"
    )
    file = find_run("last").path / "run.json"
    data = json.loads(file.read_text())
    data["config"]["runner"]["user"] = part
    file.write_text(json.dumps(data))

    assert code_of("replay", "last#0", "--env", "agentenv/Calculator-v0", *words) == 2

    assert "--trust" in capsys.readouterr().err
    assert not (stolen / "executed").exists()


@pytest.mark.parametrize(
    "config",
    [{"train": {"rollout": "mine.py:play"}}, {"demos": "policy:mine.py:show"}],
    ids=["rollout", "demos"],
)
def test_a_file_that_a_training_names_is_told_and_means_another_file_elsewhere(tmp_path, monkeypatch, config):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with RunWriter.create("x", kind="train", run_id="a-run", config=config) as writer:
        writer.close(RunStatus.INTERRUPTED)
    info = find_run("a-run").info

    assert executed_files(info.config) == [str(tmp_path / "mine.py")]
    assert is_own(info)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert not is_own(info)


def test_an_own_run_is_resumed_and_says_what_it_executes(stolen, capsys):
    assert code_of("eval", "say.py", "-m", "scripted:pear", "-n", "1", "--json") == 0
    run = find_run("last").id

    assert code_of("eval", "--resume", run, "--json") == 0
    assert f"resuming {run} executes {stolen / 'say.py'}" in capsys.readouterr().err


def test_a_training_of_another_user_is_not_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    with RunWriter.create("x", kind="train", run_id="a-run", config={"envs": {"say.py": 1.0}}) as writer:
        writer.close(RunStatus.INTERRUPTED)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))

    assert code_of("train", "--resume", "a-run") == 2
    assert "--trust" in capsys.readouterr().err
    with pytest.raises(UsageError, match="trust=True"):
        train(resume="a-run")
    assert code_of("train", "--resume", "a-run", "--trust") == 2
    assert "no checkpoint to resume from" in capsys.readouterr().err
