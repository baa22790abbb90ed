"""A recipe for an agent from the documents, driven as a user would: eval, view, train, resume, doctor."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from agentenv.cli import main
from agentenv.runs import find_run
from helpers.training import saved_tiny

pytestmark = pytest.mark.skipif(find_spec("openai") is None, reason="the SDK `openai` is not installed")
RECIPE = Path(__file__).parents[2] / "examples" / "agents" / "with_openai.py"
TEAM = Path(__file__).parents[1] / "helpers" / "team.py"
SMALL = ("-k", "2", "-o", "limits.max_turns=2", "-o", "limits.max_tokens_per_turn=8")


def agentenv(*words: str | Path) -> None:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    assert left.value.code == 0


@pytest.mark.slow
def test_a_recipe_goes_from_its_page_to_a_training_that_resumes(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = saved_tiny(tmp_path / "model")

    agentenv("eval", RECIPE, "-m", f"hf:{model}", "-n", "2", *SMALL)
    evaluated = find_run("last")
    page = tmp_path / "page.html"
    agentenv("view", evaluated.id, "--output", page)
    training = ("groups_per_step=2", "save_steps=1")
    options = [word for setting in training for word in ("-o", setting)]
    agentenv("train", RECIPE, "-m", model, "--steps", "1", *SMALL, *options)
    trained = find_run("last")
    agentenv("train", "--resume", trained.id, "--steps", "2")
    capsys.readouterr()
    agentenv("doctor", evaluated.id)
    agentenv("doctor", trained.id)
    told = capsys.readouterr().out

    assert [len(evaluated), len(find_run(trained.id))] == [4, 8]
    assert "What is 12 * 12?" in page.read_text()
    assert [line["step"] for line in find_run(trained.id).metrics()] == [1, 2]
    assert [told.count("ok    digest"), told.count("ok    prompt"), told.count("drift")] == [2, 2, 2]
    assert all(turn.num_tokens for run in (evaluated, trained) for one in run for turn in one.turns)


@pytest.mark.parametrize("agent", ["Handoff", "SubAgent", "Compaction"])
def test_the_doctor_finds_nothing_wrong_in_what_several_agents_share(agent, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    agentenv("eval", f"{TEAM}:{agent}", "-m", "mock", "-n", "4", "-k", "1")
    played = find_run("last")
    capsys.readouterr()
    agentenv("doctor", played.id)
    told = capsys.readouterr().out.splitlines()

    rows = {words[1]: words[0] for words in map(str.split, told) if words[0] in ("ok", "WRONG", "-")}
    assert rows.keys() >= {"record", "digest", "parse", "prompt", "tokenisation", "drift"}
    # The mock writes line breaks that the template does not; a drift is no fault of the record.
    assert {row: state for row, state in rows.items() if state != "ok"}.keys() <= {"drift"}
    assert {len(one.sequences) for one in played} == {{"Handoff": 2, "SubAgent": 2, "Compaction": 3}[agent]}
    assert all(sequence.num_trained_tokens for one in played for sequence in one.sequences)
