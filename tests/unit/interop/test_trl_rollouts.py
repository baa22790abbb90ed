"""A real training step of TRL's GRPOTrainer on episodes that our runner played."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import agentenv as ae
from agentenv.envspec import EnvSpec
from agentenv.interop.trl import environment_reward, rollout_func, task_rows
from agentenv.render import byte_tokenizer
from agentenv.toolenv import ToolEnv

pytestmark = pytest.mark.slow


class Short(ToolEnv):
    """Rewards answers by their length, so that a random model's groups differ."""

    def start(self, n: int) -> str:
        return f"say {n}"

    def reward(self, answer: str) -> float:
        return len(answer) / 10


def test_trl_makes_a_step_on_our_rollouts(tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    spec = EnvSpec.of("test/Short-v0", Short, tasks=[{"id": f"t{n}", "n": n} for n in range(4)])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    ours = byte_tokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=ours.backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = ours.chat_template
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import GRPOConfig, GRPOTrainer

        trainer = GRPOTrainer(
            LlamaForCausalLM(config),
            environment_reward,
            GRPOConfig(
                output_dir=str(tmp_path),
                per_device_train_batch_size=8,
                num_generations=4,
                max_completion_length=12,
                max_steps=1,
                logging_steps=1,
                use_cpu=True,
                bf16=False,
                report_to=[],
                save_strategy="no",
            ),
            datasets.Dataset.from_list(task_rows(spec)),
            processing_class=tokenizer,
            rollout_func=rollout_func(spec, limits=ae.RunLimits(max_turns=1, max_tokens_per_turn=12)),
        )
        trainer.train()

    logged = trainer.state.log_history[0]
    assert math.isfinite(logged["loss"])
    assert logged["reward"] > 0
    assert logged["grad_norm"] > 0
