"""Replay: an episode runs again from its record, and a nondeterministic environment is found out."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from agentenv.core import RunLimits, Supports
from agentenv.engine import ChatCompletion, Completion, Sampling, ScriptedEngine, Usage
from agentenv.envs import ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner, RunnerOptions
from agentenv.runs import replay_episode
from agentenv.testing import tool_call
from agentenv.tools import tool

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)
LIMITS = RunLimits(max_tool_output_tokens=60)


class Dice(ToolEnv):
    """Rolls by the seed, or by chance."""

    chance = False
    counter = itertools.count(100)

    def start(self, sides: int) -> str:
        self.sides = sides
        return f"roll {sides}"

    @tool
    def roll(self) -> str:
        "Roll."
        number = next(Dice.counter) if self.chance else int(self.np_random.integers(self.sides))
        return f"{number} " + "." * 100

    def reward(self, answer: str) -> float:
        return float(len(answer))


class Unfair(Dice):
    chance = True


async def record(env=None, script=None):
    engine = ScriptedEngine(script or [tool_call("roll"), tool_call("roll"), "done"], tokenizer=TOKENIZER)
    runner = Runner(engine, RENDERER, LIMITS, run_seed=3)
    return await runner.run_episode(env or Dice(), {"sides": 1000})


async def test_a_recorded_episode_plays_again_to_the_same_record():
    first = await record()

    again = await replay_episode(first, Dice(), RENDERER, limits=LIMITS)

    assert again.same
    assert again.trajectory.sequences == first.sequences
    assert again.trajectory.messages == first.messages
    assert again.trajectory.reward == first.reward


async def test_an_episode_with_a_rewritten_history_plays_again_to_the_same_sequences():
    options = RunnerOptions(history="rewrite")
    script = ["<think>hm</think>" + tool_call("roll"), tool_call("roll").replace('", "', '","'), "done"]
    engine = ScriptedEngine(script, tokenizer=TOKENIZER)
    first = await Runner(engine, RENDERER, LIMITS, options=options).run_episode(Dice(), {"sides": 9})

    again = await replay_episode(first, Dice(), RENDERER, limits=LIMITS, options=options)
    verbatim = await replay_episode(first, Dice(), RENDERER, limits=LIMITS)

    assert len(first.sequences) > 1
    assert again.same
    assert verbatim.difference.what == "tokens"


async def test_a_nondeterministic_environment_is_reported_at_its_first_difference():
    first = await record(Unfair())

    again = await replay_episode(first, Unfair(), RENDERER, limits=LIMITS)

    assert not again.same
    assert (again.difference.what, again.difference.turn) == ("message", 1)
    assert again.difference.recorded == first.messages[2]
    assert "differs after 1 turns" in str(again.difference)


async def test_other_limits_show_as_a_difference_and_a_changed_reward_too():
    class Kinder(Dice):
        def reward(self, answer: str) -> float:
            return 99.0

    first = await record()

    uncut = await replay_episode(first, Dice(), RENDERER)
    kinder = await replay_episode(first, Kinder(), RENDERER, limits=LIMITS)

    assert uncut.difference.what == "message"
    assert kinder.difference.what == "turn_rewards"


async def test_versions_and_foreign_tokens_are_replayed_as_they_were():
    ids = (*TOKENIZER.encode(tool_call("roll")), 258)

    class Mixed(ScriptedEngine):
        async def generate(self, prompt_ids, sampling, **request):
            self.requests.append(prompt_ids)
            if len(self.requests) == 1:
                return Completion(ids, (-0.5,) * len(ids), "stop", ((1, 0, 5), (2, 5, len(ids))))
            return Completion((104, 258), (), "stop", sampled_by_policy=False)

    first = await Runner(Mixed([]), RENDERER, LIMITS).run_episode(Dice(), {"sides": 9})

    again = await replay_episode(first, Dice(), RENDERER, limits=LIMITS)

    assert again.same
    assert again.trajectory.sequences == first.sequences


class Talks:
    """An engine that only speaks text."""

    name, max_context_tokens = "talks", None

    def __init__(self, answers):
        self.answers = iter(answers)

    async def chat(self, messages, tools, sampling, *, deadline_s=None):
        return ChatCompletion(next(self.answers), Usage(10, 5), "stop")

    async def close(self):
        pass


async def test_an_episode_without_tokens_is_replayed_too():
    made = {"id": "a", "type": "function", "function": {"name": "roll", "arguments": "{}"}}
    answers = [
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "assistant", "content": "done"},
    ]
    first = await Runner(Talks(answers), limits=LIMITS).run_episode(Dice(), {"sides": 9})

    again = await replay_episode(first, Dice(), limits=LIMITS)

    assert first.sequences == ()
    assert "only speaks text" in first.untrainable_reason
    assert again.same


class Kept(ScriptedEngine):
    """Returns the support of each token, if it is asked for it."""

    async def generate(self, prompt_ids, sampling, **request):
        done = await super().generate(prompt_ids, sampling, **request)
        if not sampling.wants_support:
            return done
        return replace(done, supports=Supports.of({token, 3, 9} for token in done.token_ids))


@pytest.mark.parametrize("keep", [True, False])
async def test_a_replay_of_a_cut_distribution_has_its_supports_or_says_that_it_has_none(keep):
    engine = Kept([tool_call("roll"), "done"], tokenizer=TOKENIZER)
    asked = Sampling(top_p=0.9, keep_support=keep)
    first = await Runner(engine, RENDERER, LIMITS, sampling=asked, run_seed=3).run_episode(
        Dice(), {"sides": 1000}
    )

    again = await replay_episode(first, Dice(), RENDERER, limits=LIMITS)

    assert again.same
    assert again.trajectory.sequences == first.sequences
    assert [one.trainable for one in (first, again.trajectory)] == [keep, keep]
    assert [span.supports is not None for span in first.sequences[0].spans if span.trained] == [keep] * 2
    assert keep or "keep_support" in again.trajectory.untrainable_reason
