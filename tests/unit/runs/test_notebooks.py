"""What results show in a notebook."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentenv as ae
from agentenv.core import UsageError
from agentenv.envs import EnvSpec
from agentenv.runs import EvalResult, show
from agentenv.training import TrainResult


class Choice(ae.ToolEnv):
    """Say <b>yes</b>."""

    def start(self, word: str) -> str:
        return f"Say <b>{word}</b>."

    def reward(self, answer: str, word: str) -> float:
        return float(word in answer)


def polite(answer: str) -> float:
    return 0.0


ENTRY = EnvSpec.of("notebook/Choice-v0", Choice, tasks=[{"word": "yes"}, {"word": "no"}], rewards=[polite])


def played(runs_dir: Path | None = None, model: str = "scripted:yes") -> EvalResult:
    return ae.evaluate(ENTRY, model, group_size=2, runs_dir=runs_dir)


def test_a_report_prints_what_the_command_line_prints(capsys):
    report = played().report

    print(report)

    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].startswith("reward   mean 0.500 [")
    assert "stops    final_answer 4" in shown
    assert "! all episodes of each task have the same reward" in shown


def test_whatever_was_played_can_be_shown(tmp_path):
    stored, memory = played(tmp_path), played()
    trained = TrainResult((), stored.run, steps_done=1, checkpoint=None)
    pages = [
        show(what).page
        for what in (
            stored,
            stored.run,
            trained,
            memory,
            memory.groups,
            memory.groups[0],
            memory.groups[0][0],
        )
    ]

    assert all("notebook/Choice-v0" in page for page in pages)


def test_nothing_to_show_is_told():
    elsewhere = TrainResult((), None, steps_done=1, checkpoint=None)

    for what in (elsewhere, []):
        with pytest.raises(UsageError, match="there are no episodes to show"):
            show(what)
