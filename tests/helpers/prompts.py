"""An environment whose prompts are as long as its tasks say, and a trainer on it."""

from __future__ import annotations

from typing import ClassVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import agentenv as ae
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import byte_tokenizer
from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer

SIZES = (5, 500, 8, 600, 3, 700, 2, 9)


class Long(ToolEnv):
    scored: ClassVar[list[int]] = []
    begun: ClassVar[list[int]] = []

    def start(self, size: int) -> str:
        self.begun.append(size)
        self.size = size
        return "x" * size

    def reward(self, answer: str) -> float:
        self.scored.append(self.size)
        return len(answer) / 10


def trainer_of(
    tmp_path,
    *,
    envs=None,
    tasks=None,
    limits=None,
    spec_limits=None,
    on_metrics=None,
    runner=None,
    on_trajectory=None,
    on_held_out=None,
    **options,
) -> GRPOTrainer:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=2048,
        )
    ).eval()
    Long.scored, Long.begun = [], []
    tasks = [{"size": size} for size in SIZES] if tasks is None else tasks
    settings = {"groups_per_step": 2, "num_generations": 2, "max_steps": 2, **options}
    return GRPOTrainer(
        GRPOConfig(output_dir=str(tmp_path), **settings),
        model=model,
        tokenizer=byte_tokenizer(),
        envs=envs or EnvSpec.of("test/Long-v0", Long, tasks=tasks, limits=spec_limits),
        callbacks=Callbacks(on_metrics=on_metrics, on_trajectory=on_trajectory, on_held_out=on_held_out),
        runner=runner,
        limits=limits or ae.RunLimits(max_turns=1, max_tokens_per_turn=4),
    )
