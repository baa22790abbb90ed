"""A real training step of TRL's GRPOTrainer on episodes that our runner played."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import pytest

from agentenv.core import RunLimits, StopReason, UsageError
from agentenv.engine import ScriptedEngine
from agentenv.render import byte_tokenizer
from agentenv.testing import tool_call
from agentenv.tools import tool
from agentenv_bridges import rollout_func, split_sequence, task_rows
from agentenv_bridges.trainers.trl import _Bounded, _sampling
from scenes import TOKENIZER, Lengths, numbered, play

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Echo(Lengths):
    @tool
    def echo(self, text: str, times: int) -> str:
        "Say it so many times."
        return text * times


SPEC = numbered(count=4)
SHORT = RunLimits(max_turns=1, max_tokens_per_turn=12)


@pytest.fixture
def trained(trl_trainer):
    """Give a function that makes a step of TRL's trainer on rollouts, and returns what it logged."""

    def train(rollout=None, *, batch=4, **options):
        trainer = trl_trainer(
            task_rows(SPEC),
            chat_template=byte_tokenizer().chat_template,
            settings={"per_device_train_batch_size": batch, "max_completion_length": 12},
            rollout_func=rollout or rollout_func(SPEC, limits=SHORT),
            **options,
        )
        trainer.train()
        return trainer.state.log_history[0]

    return train


def test_trl_makes_a_step_on_our_rollouts(trained):
    logged = trained(batch=8)

    assert math.isfinite(logged["loss"])
    assert logged["reward"] > 0
    assert logged["grad_norm"] > 0


def test_reward_functions_get_stop_reason_truncation_and_turn_rewards(trained):
    heard = {}

    def watching(completions, stop_reason, truncated, turn_rewards, env_reward, **_):
        heard.update(stop_reason=stop_reason, truncated=truncated, turn_rewards=turn_rewards)
        return env_reward

    trained(reward=watching)

    reasons = [StopReason(reason) for reason in heard["stop_reason"]]
    assert heard["truncated"] == [reason.truncated for reason in reasons]
    assert StopReason.GENERATION_LENGTH in reasons
    assert [len(rewards) for rewards in heard["turn_rewards"]] == [1] * 4


@pytest.mark.parametrize("limits", [None, RunLimits(max_tokens_per_turn=50)])
def test_no_completion_is_longer_than_trl_allows(trained, limits):
    rollout, lengths = rollout_func(SPEC, limits=limits), list[int]()

    def watched(prompts, trainer):
        columns = rollout(prompts, trainer)
        lengths.extend(map(len, columns["completion_ids"]))
        return columns

    trained(watched)

    assert len(lengths) == 4
    assert max(lengths) <= 12


@pytest.mark.parametrize(
    ("times", "reason", "length"),
    [(1, StopReason.GENERATION_LENGTH, 300), (300, StopReason.CONTEXT_LENGTH, None)],
)
def test_tool_output_counts_to_the_completions_length(times, reason, length):
    call = tool_call("echo", text="a", times=times)
    engine = ScriptedEngine([call, "b" * 500], tokenizer=TOKENIZER)

    one = asyncio.run(play(Echo(), _Bounded(engine, 300), {"n": 0}))

    assert one.stop_reason is reason
    response = split_sequence(one.sequences[0]).response_ids
    assert len(response) == (length or len(TOKENIZER.encode(call + "<|im_end|>")))


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_what_trl_cuts_off_the_distribution_is_refused(cut):
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "max_completion_length": 12}

    with pytest.raises(UsageError, match="leave these out of TRL's GRPOConfig"):
        _sampling(SimpleNamespace(**plain | cut))

    assert _sampling(SimpleNamespace(**plain)).max_tokens == 12
