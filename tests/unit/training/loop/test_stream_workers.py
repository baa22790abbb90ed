"""A stream of groups that workers play."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import agentenv as ae
from agentenv.render import byte_tokenizer
from agentenv.training.loop import save_tokenizer
from helpers.model_server import model_server
from helpers.worker_runs import DEADLY


@pytest.mark.slow
def test_workers_play_a_stream_and_every_group_is_trained_once(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=byte_tokenizer().vocab_size, initializer_range=0.2, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    save_tokenizer(byte_tokenizer(), tmp_path / "tiny")
    Path("lengths.py").write_text("def length(trajectory):\n    return len(trajectory.answer) / 10\n")

    with model_server(str(tmp_path / "tiny")) as server:
        result = ae.train(
            DEADLY,
            str(tmp_path / "tiny"),
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
