"""The commands of the tutorial work, in their order, on the file that the tutorial shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.cli import main
from helpers.scripts import BENCHMARKS, load_benchmark


@pytest.fixture(scope="module")
def script():
    return load_benchmark("tutorial")


@pytest.fixture(autouse=True)
def shelves(script, _own_folder_and_registry):
    """Write the file into the empty folder."""
    path = Path("shelves.py")
    path.write_text(script.shelves())
    return path


def run(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


def test_the_file_of_the_page_is_that_of_the_examples_and_has_the_whole_way(script):
    verbs = [words[0] for words in script.commands()]

    assert script.shelves() == (BENCHMARKS.parent / "examples" / "shelves.py").read_text()
    assert verbs[:2] == ["check", "eval"]
    assert set(verbs) >= {"check", "eval", "train", "view", "doctor", "export", "new"}


@pytest.mark.parametrize("policy", ["oracle", "random", "policy:shelves.py:clerk"])
def test_the_scores_of_policies_without_a_model_are_those_of_the_page(policy: str, script, capsys):
    (words,) = [words for words in script.commands() if words[0] == "eval" and words[3] == policy]
    score = re.search(r"reward   mean \S+ \[\S+, \S+\] 95 %", script.PAGE.split(f"-m {policy} ", 1)[1])

    assert run(words) == 0

    assert score is not None
    assert score[0] in capsys.readouterr().out


def test_the_checker_finds_the_leak_that_the_page_suggests(shelves: Path, capsys):
    shelves.write_text(shelves.read_text().replace("{title}?", "{title}? (It is on {shelf}.)"))

    assert run(["check", "shelves.py"]) == 1

    assert "✗ leak" in capsys.readouterr().out


@pytest.mark.slow
def test_every_command_of_the_page_works_with_a_tiny_model(tiny_model: str):
    options = ["--quick", "--model", f"hf:{tiny_model}", "--json", "walk.json"]
    command = [sys.executable, BENCHMARKS / "tutorial.py", *options]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    walked = json.loads(Path("walk.json").read_text())
    assert len(walked["rows"]) >= 9
    assert len(walked["curve"]["reward"]) == 1
    assert len(walked["curve"]["held out"]) == 2
