"""Shared by the tests of what we write for others: a trainer of TRL's for one real step."""

from __future__ import annotations

import pytest

from agentenv.render import byte_tokenizer
from agentenv_bridges import environment_reward
from scenes import language_model


@pytest.fixture
def trl_trainer(tmp_path, monkeypatch):
    """Give a function that makes TRL's GRPOTrainer on a tiny random model; skip without TRL."""
    pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def make(rows, *, chat_template, settings, reward=environment_reward, **options):
        from transformers import PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=byte_tokenizer().backend,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            chat_template=chat_template,
        )
        common = {"output_dir": str(tmp_path), "num_generations": 4, "max_steps": 1, "logging_steps": 1}
        common |= {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no"}
        return GRPOTrainer(
            language_model(),
            reward,
            GRPOConfig(**common, **settings),
            datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            **options,
        )

    return make
