"""The self-correction environment: shaped rewards of both attempts, through the runner."""

from __future__ import annotations

import random

import pytest

from agentenv.core import Action, Context, RunLimits, StopReason, UsageError
from agentenv.engine import ScriptedEngine
from agentenv.envs import EnvSpec
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner
from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer, demonstrate
from agentenv_envs.score_self_correction import ASK_AGAIN, SelfCorrection, oracle, tasks

TASK = {"question": "What is 20 * 20 + 100?", "answer": 500}
TOKENIZER = byte_tokenizer()


async def play(first: str, second: str, **kwargs):
    engine = ScriptedEngine([first, second], tokenizer=TOKENIZER)
    return await Runner(engine, Renderer(TOKENIZER)).run_episode(SelfCorrection(**kwargs), TASK)


@pytest.mark.parametrize(
    ("first", "second", "shaped"),
    [("400", "500", 3.0), ("500", "500", 1.0), ("500", "400", -2.0), ("400", "401", 0.0)],
)
async def test_the_second_attempt_gets_its_correctness_and_the_weighted_progress(first, second, shaped):
    both = await play(f"It is {first}.", f"It is {second}.", alpha=2)
    only = await play(f"It is {first}.", f"It is {second}.", alpha=2, stage=1)

    assert both.turn_rewards == (3.0 * (first == "500"), shaped)
    assert only.turn_rewards == (0.0, shaped)
    assert both.stop_reason is StopReason.ENV_TERMINATED
    assert both.reward == sum(both.turn_rewards)
    assert both.messages[2] == {"role": "user", "content": ASK_AGAIN}


@pytest.mark.parametrize("alpha", [0, 0.5, 2, 10])
@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
async def test_two_right_answers_earn_most_whatever_credit_a_turn_gets(alpha, discount):
    def returned(rewards):
        return rewards[0] + discount * rewards[1]

    earned = {
        (first, second): (await play(first, second, alpha=alpha)).turn_rewards
        for first in ("500", "400")
        for second in ("500", "400")
    }
    whole = {answers: sum(rewards) for answers, rewards in earned.items()}
    first = {answers: returned(rewards) for answers, rewards in earned.items()}

    assert max(whole, key=lambda answers: whole[answers]) == ("500", "500")
    assert sorted(whole.values())[-1] > sorted(whole.values())[-2]
    assert whole["500", "500"] == SelfCorrection(alpha=alpha).full_marks
    for second in (
        "500",
        "400",
    ):  # a right first answer is never worse than a wrong one before the same second
        assert first["500", second] >= first["400", second]
        assert earned[("500", "500")][1] > earned[("500", "400")][1]


async def test_an_answer_without_a_number_is_wrong_and_a_thousands_comma_is_read():
    record = await play("no idea", "perhaps 1,500 or 500")

    assert record.turn_rewards == (0.0, 3.0)


def test_tasks_are_disjoint_and_the_oracle_is_right():
    train, test = list(tasks("train")), list(tasks("test"))

    assert (len(train), len(test)) == (400, 120)
    assert not {row["id"] for row in train} & {row["id"] for row in test}
    for row in (*train, *test):
        left, _, rest = str(row["id"]).partition("*")
        middle, _, last = rest.partition("+")
        assert int(left) * int(middle) + int(last) == row["answer"]
        assert str(row["answer"]) in oracle([], row, random.Random(0))["content"]


@pytest.mark.parametrize("wrong", [{"alpha": -1}, {"stage": 3}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SelfCorrection(**wrong)


async def test_a_number_too_long_to_read_is_no_answer():
    env = SelfCorrection()
    task = next(iter(tasks("train")))
    await env.begin(task, seed=0, context=Context())

    result = await env.advance(Action.of({"role": "assistant", "content": "9" * 5_000}))

    assert (result.reward, result.terminated) == (0.0, False)


async def test_turns_are_marked_by_attempt_and_both_results_are_named():
    both = await play("It is 400.", "It is 500.", alpha=2)
    cut = await Runner(
        ScriptedEngine(["It is 500."], tokenizer=TOKENIZER), Renderer(TOKENIZER), RunLimits(max_turns=1)
    ).run_episode(SelfCorrection(), TASK)

    assert [turn.attempt for turn in both.turns] == [0, 1]
    assert both.rewards == {"first_correct": 0.0, "second_correct": 1.0}
    assert both.reward == 3.0
    assert cut.rewards == {"first_correct": 1.0}


class FirstAttemptUnshaped(SelfCorrection):
    """The paper's sum over both attempts, in which the first one earns r1 alone."""

    def step(self, action):
        told, reward, ended, cut, info = super().step(action)
        return told, reward if ended else info["correct"], ended, cut, info


def share_of_right_first_answers(env):
    """Train a new model with the default credit, and return the shares before and after."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    questions = [{"question": f"What is {n} + 1?", "answer": n + 1} for n in range(1, 5)]
    entry = EnvSpec.of("test/SelfCorrection-v0", env, tasks={"train": questions, "test": questions})
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings = {"vocab_size": TOKENIZER.vocab_size, "initializer_range": 0.1}
    played = []
    trainer = GRPOTrainer(
        GRPOConfig(
            max_steps=60,
            groups_per_step=4,
            num_generations=8,
            learning_rate=1e-3,
            eval_temperature=1,
            num_generations_eval=16,
        ),
        envs=entry,
        model=LlamaForCausalLM(LlamaConfig(**settings, **sizes)),
        tokenizer=TOKENIZER,
        limits=RunLimits(max_tokens_per_turn=3),
        callbacks=Callbacks(on_held_out=played.append),
    )

    def share():
        played.clear()
        trainer.evaluate()
        return sum(episode.rewards.get("first_correct", 0.0) for episode in played) / len(played)

    def teacher(messages, task, rng):
        return str(task["answer"] if rng.random() < 0.5 else rng.randint(2, 5))

    shown = demonstrate(entry, questions * 60, teacher, trainer.renderer, seed=0)
    trainer.warmup(shown, steps=120, batch_size=32, learning_rate=2e-3, lr_scheduler_type="cosine")
    before = share()
    trainer.train()
    return before, share()


@pytest.mark.exhaustive
def test_a_training_with_the_default_credit_learns_to_be_right_at_once():
    before, after = share_of_right_first_answers(SelfCorrection)

    assert after > before + 0.2


@pytest.mark.exhaustive
def test_with_the_unshaped_sum_the_same_training_learns_to_fail_first():
    before, after = share_of_right_first_answers(FirstAttemptUnshaped)

    assert after < 0.1 < before
