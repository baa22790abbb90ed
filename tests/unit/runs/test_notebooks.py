"""What results show in a notebook, and their data frames."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentenv as ae
from agentenv.core import DependencyMissing, UsageError
from agentenv.envs import EnvSpec
from agentenv.runs import EvalResult, Run, compare, show
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


def run_of(result: EvalResult) -> Run:
    assert result.run is not None
    return result.run


def test_a_report_prints_what_the_command_line_prints(capsys):
    report = played().report

    print(report)

    shown = capsys.readouterr().out
    assert shown.startswith("reward   mean 0.500 [")
    assert "stops    final_answer 4" in shown
    assert "! all episodes of each task have the same reward" in shown
    assert "reward   mean 0.500" in report._repr_html_()


def test_results_show_themselves_without_markup_of_others(tmp_path):
    result = played(tmp_path)
    run, memory = run_of(result), played()

    assert f"run {run.id}" in result._repr_html_()
    assert "finished  model scripted:yes" in run._repr_html_()
    assert "<td>1</td><td>1</td><td>final_answer</td>" in memory.groups[0]._repr_html_()
    assert "Say &lt;b&gt;yes&lt;/b&gt;." in memory.groups[0][0]._repr_html_()
    assert "<b>" not in memory.groups[0][0]._repr_html_()


def test_episodes_and_changes_are_data_frames(tmp_path):
    pytest.importorskip("pandas", reason="needs the notebook extra")
    before, after = played(tmp_path), played(tmp_path, "scripted:yes and no")
    changes = compare(run_of(before), run_of(after))

    frame = before.to_dataframe()

    assert list(frame["reward"]) == [1.0, 1.0, 0.0, 0.0]
    assert list(frame["rewards/polite"]) == [0.0, 0.0, 0.0, 0.0]
    assert sorted(run_of(before).to_dataframe()["reward"]) == [0.0, 0.0, 1.0, 1.0]
    assert sorted(changes.to_dataframe()["change"]) == [0.0, 1.0]
    assert changes._repr_html_().index("<td>1</td>") < changes._repr_html_().rindex("<td>0</td>")


def test_steps_of_a_training_are_numbered_in_the_whole_run(tmp_path):
    pytest.importorskip("pandas", reason="needs the notebook extra")
    history = ({"reward": 0.25, "kl": 0.1}, {"reward": 0.5})
    result = TrainResult(history, run_of(played(tmp_path)), steps_done=7, checkpoint=None)

    assert list(result.to_dataframe()["step"]) == [6, 7]
    assert "<th>step</th><th>reward</th><th>kl</th>" in result._repr_html_()
    assert "<td>7</td><td>0.5</td><td>-</td>" in result._repr_html_()


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


def test_a_missing_pandas_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("agentenv.core.errors.find_spec", lambda name: None)

    with pytest.raises(DependencyMissing, match=r"to_dataframe\(\) needs pandas; .*\[notebook\]"):
        played().to_dataframe()
