"""The command that evaluates a model on many worlds."""

import json
import sys

import pytest

from helpers.scripts import load_benchmark


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["scores.py", *arguments])
    return load_benchmark("scores").main()


def test_worlds_are_scored_and_what_cannot_be_played_is_named(monkeypatch, tmp_path, capsys):
    file = tmp_path / "scores.json"
    worlds = ["agentenv/Calculator-v0", "agentenv/Nothing-v0"]

    code = run(monkeypatch, "-m", "oracle", "-n", "3", "--json", str(file), "--only", *worlds)

    figures = json.loads(file.read_text())["oracle"]
    assert code == 0
    assert (figures[worlds[0]]["reward"]["mean"], figures[worlds[0]]["episodes"]) == (1.0, 3)
    assert figures[worlds[0]]["reward"]["low"] < 1.0
    assert "agentenv/Nothing-v0" in figures[worlds[1]]["not_played"]
    assert "agentenv/Calculator-v0         1.00" in capsys.readouterr().out


def test_an_older_file_is_continued_and_limits_hold(monkeypatch, tmp_path):
    file = tmp_path / "scores.json"
    file.write_text(json.dumps({"oracle": {"x": {"not_played": "y"}}}))

    run(
        monkeypatch, "-n", "2", "--max-turns", "1", "--max-tokens", "8", "--json", str(file),
        "--only", "agentenv/Wordle-v0",
    )  # fmt: skip

    figures = json.loads(file.read_text())
    assert figures["oracle"] == {"x": {"not_played": "y"}}
    assert figures["mock"]["agentenv/Wordle-v0"]["sampled_tokens"] <= 2 * 8


@pytest.mark.parametrize("world", ["agentenv/Nothing-v0"])
def test_the_command_fails_if_nothing_could_be_played(monkeypatch, world):
    assert run(monkeypatch, "--only", world) == 1
