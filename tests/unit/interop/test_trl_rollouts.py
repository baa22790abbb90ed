"""A real training step of TRL's GRPOTrainer on episodes that our runner played."""

from __future__ import annotations

import math

import pytest

import agentenv as ae
from agentenv.envspec import EnvSpec
from agentenv.interop.trl import rollout_func, task_rows
from agentenv.render import byte_tokenizer
from agentenv.toolenv import ToolEnv

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Short(ToolEnv):
    """Rewards answers by their length, so that a random model's groups differ."""

    def start(self, n: int) -> str:
        return f"say {n}"

    def reward(self, answer: str) -> float:
        return len(answer) / 10


def test_trl_makes_a_step_on_our_rollouts(trl_trainer):
    spec = EnvSpec.of("test/Short-v0", Short, tasks=[{"id": f"t{n}", "n": n} for n in range(4)])
    trainer = trl_trainer(
        task_rows(spec),
        chat_template=byte_tokenizer().chat_template,
        settings={"per_device_train_batch_size": 8, "max_completion_length": 12},
        rollout_func=rollout_func(spec, limits=ae.RunLimits(max_turns=1, max_tokens_per_turn=12)),
    )

    trainer.train()

    logged = trainer.state.log_history[0]
    assert math.isfinite(logged["loss"])
    assert logged["reward"] > 0
    assert logged["grad_norm"] > 0
