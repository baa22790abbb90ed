"""The way of a new environment, on the example of a library's desk: check, play, train, look, export, import.

A tiny model trains here, so the steps show that every part works together, not that anything is learned;
benchmarks/README.md has what SmolLM2 learns.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.cli import main
from agentenv.envs import registry
from agentenv.runs import find_run
from agentenv.testing import check_env
from scenes import saved_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "library_desk.py"
READ_BACK = {
    "openai": "openai.jsonl",
    "trl": "trl.jsonl",
    "verl": "verl.jsonl",
    "slime": "slime.jsonl",
    "prime-rl": "prime-rl.jsonl",
    "atif": "atif",
}
"""What `agentenv export` writes for each format that keeps reward and stop reason."""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True, scope="module")
def _restored_registry():  # after the last test: a file is imported, and so registered, once in a process
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


async def test_every_kind_of_task_is_solved_by_its_oracle_and_by_nothing_trivial():
    report = await check_env(str(EXAMPLE), tasks=20, only=("recipe", "oracle", "trivial"))

    assert report.ok, str(report)
    assert run("check", str(EXAMPLE), "-n", "3") == 0


def test_episodes_are_read_back_from_every_format_that_has_room_for_them(capsys):
    assert run("eval", str(EXAMPLE), "-m", "oracle", "-n", "4") == 0
    played = find_run("last")
    facts = facts_of(played)

    for shape, file in READ_BACK.items():
        assert run("export", played.id, "--as", shape) == 0
        assert run("import", str(played.path / file)) == 0
        assert facts_of(find_run("last")) == facts, shape
    assert {reward for _, reward, _, _ in facts} == {1.0}


def test_a_model_trains_on_the_oracles_demonstrations_and_is_scored_on_held_out_tasks(tmp_path, capsys):
    tiny = saved_model(tmp_path / "tiny", max_position_embeddings=4096)
    small = ("max_tokens_per_turn=100", "groups_per_step=1", "eval_tasks=2", "eval_on_start=true")
    settings = [word for setting in small for word in ("-o", setting)]

    words = ("--demos", "oracle", "--num-demos", "8", "--steps", "1", "-k", "2")
    assert run("train", str(EXAMPLE), "-m", tiny, *words, *settings) == 0

    shown = capsys.readouterr().out
    assert "warm-up on 8 demonstrations, mean reward 1.00" in shown
    assert "before the first step: held-out success 0.000" in shown
    trained = find_run("last")
    assert [line["step"] for line in trained.metrics()] == [0, 1]
    for shape in ("trl", "slime"):
        capsys.readouterr()
        assert run("export", trained.id, "--as", shape) == 0
        exported = capsys.readouterr().out
        assert [line.split()[3] for line in exported.splitlines() if line.startswith("left out")] == [
            "demonstration",
            "held-out",
        ]
        assert len((trained.path / f"{shape}.jsonl").read_text().splitlines()) == 2
    assert run("export", trained.id, "--as", "sft") == 0
    assert "left out: 4 held-out episodes" in capsys.readouterr().out
    assert len((trained.path / "sft.jsonl").read_text().splitlines()) == 8
    assert run("doctor", trained.id) == 0
    assert run("view", trained.id, "--output", "run.html") == 0


def facts_of(stored):
    episodes = [stored.load(number) for number in range(len(stored))]
    return [(one.task_id, one.reward, one.stop_reason, one.turn_rewards) for one in episodes]
