"""A stream of groups that workers play."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import agentenv as ae
from helpers.model_server import model_server
from helpers.worker_runs import DEADLY
from scenes import saved_model


@pytest.mark.slow
def test_workers_play_a_stream_and_every_group_is_trained_once(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = saved_model(tmp_path / "tiny")
    Path("lengths.py").write_text("def length(trajectory):\n    return len(trajectory.answer) / 10\n")

    with model_server(model) as server:
        result = ae.train(
            DEADLY,
            model,
            steps=3,
            group_size=2,
            train={
                "groups_per_step": 2,
                "learning_rate": 0.01,
                "engine": f"{server.url}/v1",
                "max_ahead": 1,
                "workers": 2,
            },
            limits={"max_turns": 1, "max_tokens_per_turn": 6},
            runner={"score": "lengths.py:length"},
            demos="none",
        )

    groups = Counter(episode.group_id for episode in result.run)
    assert len(groups) == 6
    assert set(groups.values()) == {2}
    assert [step["episodes"] for step in result.history] == [4, 4, 4]
    assert all(step["staleness/max"] <= 1 for step in result.history)
    assert {"driver", "w1", "w2"} <= {row["worker"] for row in result.run.workers()}
