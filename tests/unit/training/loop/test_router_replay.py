"""Training with replayed routers, from the engine's choices over the episodes to the step."""

from __future__ import annotations

import pytest

import agentenv as ae
from agentenv.core import UsageError
from agentenv.engine import MockEngine, TransformersEngine
from agentenv.envs import Env, EnvSpec
from agentenv.render import byte_tokenizer
from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer, LoraOptions
from helpers.moe import tiny_moe
from helpers.training import group, trainer_of


class Talk(Env):
    """Two turns, rewarded by their lengths, so that a random model's groups differ."""

    def reset(self, *, seed=None, options=None):
        self.told = 0
        return f"say {self.task['n']}", {}

    def step(self, action: str):
        self.told += 1
        return "more", len(action) / 10, self.told == 2, False, {}


def make_trainer(path, *, engine=None, **settings):
    kept = []
    options = {"groups_per_step": 2, "num_generations": 2, "learning_rate": 0.01, "max_steps": 2}
    options |= {"router_replay": True, "beta": 0.1, "router_aux_loss_coef": 0.01, "num_minibatches": 2}
    options |= {"old_logprobs": "recompute", "dtype": "float32", "stop": tuple("abcdefghij")}
    tokenizer = byte_tokenizer()
    trainer = GRPOTrainer(
        GRPOConfig(output_dir=str(path), **{**options, **settings}),
        model=tiny_moe(vocab_size=tokenizer.vocab_size, max_position_embeddings=512).float(),
        tokenizer=tokenizer,
        engine=engine,
        envs=EnvSpec.of("test/Talk-v0", Talk, tasks=[{"n": n} for n in range(4)]),
        limits=ae.RunLimits(max_tokens_per_turn=12),
        callbacks=Callbacks(on_trajectory=kept.append),
    )
    return trainer, kept


LORA = LoraOptions(r=2, target_modules=("q_proj", "v_proj"))


@pytest.mark.parametrize("way", [{}, {"lora": LORA}, {"max_ahead": 1}])
def test_episodes_carry_the_engines_choices_to_the_step(tmp_path, way):
    trainer, kept = make_trainer(tmp_path, **way)

    history = trainer.train()

    whole = [one for one in kept if one.reward is not None]
    assert whole
    for one in whole:
        for sequence in one.sequences:
            routed = sequence.routed_experts
            sampled = max(place for place, trained in enumerate(sequence.loss_mask) if trained)
            assert len(routed) == sampled
            assert (routed.layers, routed.choices, routed.width) == (3, 2, 1)
    trained = [metrics for metrics in history if metrics["tokens/trained"]]
    assert trained
    assert all(1 < metrics["moe/load/max"] <= 3 and metrics["moe/aux_loss"] > 0 for metrics in trained)
    if not way or "lora" in way:  # the engine samples from the weights that the step begins with
        assert all(metrics["mismatch/k3"] < 1e-6 for metrics in trained)


def test_an_engine_that_tells_no_experts_is_refused(tmp_path):
    silent = TransformersEngine(tiny_moe(vocab_size=300).float())
    for engine in (MockEngine(byte_tokenizer()), silent):
        trainer, _ = make_trainer(tmp_path, engine=engine)
        with pytest.raises(UsageError, match="does not tell to which experts"):
            trainer.train()
    silent.shutdown()


def test_episodes_without_experts_are_refused():
    trainer = trainer_of(tiny_moe(), router_replay=True)

    with pytest.raises(UsageError, match="the experts of 0 of the 8 tokens"):
        trainer.step([group("a", [0.0, 1.0])])
