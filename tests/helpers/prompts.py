"""An environment whose prompts are as long as its tasks say, and a trainer on it."""

from __future__ import annotations

from typing import ClassVar

from agentenv.envs import ToolEnv
from agentenv.training import GRPOTrainer
from scenes import language_model, spec_of, trainer

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


def trainer_of(tmp_path, *, envs=None, tasks=None, spec_limits=None, **settings) -> GRPOTrainer:
    Long.scored, Long.begun = [], []
    tasks = [{"size": size} for size in SIZES] if tasks is None else tasks
    model = language_model(vocab_size=300, max_position_embeddings=2048, initializer_range=0.02)
    settings = {"envs": envs or spec_of(Long, tasks, limits=spec_limits), "max_steps": 2, **settings}
    return trainer(tmp_path, model=model, **settings)
