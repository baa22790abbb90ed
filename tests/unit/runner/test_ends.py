"""Ends: terminated, truncated and done told apart, seen by the environment, and rewarded once."""

from __future__ import annotations

import pytest

from agentenv.core import RunLimits, StopReason, Trajectory
from agentenv.engine import ScriptedEngine
from agentenv.envs import Env, EnvSpec, ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import FunctionUser, Runner, RunnerOptions, ScriptedUser, User, UserTurn
from agentenv.testing import tool_call
from agentenv.tools import tool

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)


class Counter(ToolEnv):
    """Counts finishes and closes; done after a number of calls."""

    def start(self, done_after: int = 99) -> str:
        self.left = done_after
        self.finishes: list[str] = []
        self.closed = 0
        return "count"

    @tool
    def tick(self) -> str:
        "Tick."
        self.left -= 1
        return f"{self.left} left"

    def is_done(self) -> bool:
        return self.left <= 0

    def reward(self, stop_reason: str) -> float:
        self.finishes.append(stop_reason)
        return 1.0

    def close(self) -> None:
        self.closed += 1


class Steps(Env):
    """Ends by itself after some steps; each step is rewarded."""

    def __init__(self, steps: int = 2, *, truncated: bool = False) -> None:
        self.steps, self.truncated = steps, truncated
        self.said: list[str] = []

    def reset(self, *, seed=None, options=None):
        return "first", {}

    def step(self, action: str):
        self.said.append(action)
        over = len(self.said) >= self.steps
        return f"seen {action}", 0.5, over and not self.truncated, over and self.truncated, {}

    def finish(self, stop_reason: str) -> float:
        return 2.0


class Talk(Counter):
    ends_on_text = False


async def play(script, env, task=None, *, user=None, done_policy="stop", **limits) -> Trajectory:
    engine = ScriptedEngine(script, tokenizer=TOKENIZER)
    runner = Runner(engine, RENDERER, RunLimits(**limits), options=RunnerOptions(retries=0))
    record = await runner.run_episode(env, task or {}, user=user, done_policy=done_policy)
    play.requests = engine.requests
    assert record.reward is None or sum(record.turn_rewards) == record.reward
    return record


async def test_an_environment_that_ends_at_step_two_is_not_stepped_again():
    env = Steps(2)

    record = await play(["a", "b", "c"], env, max_turns=10)

    assert record.stop_reason is StopReason.ENV_TERMINATED
    assert record.terminated
    assert env.said == ["a", "b"]
    assert len(play.requests) == 2
    assert record.turn_rewards == (0.5, 2.5)
    assert record.reward == 3.0
    assert record.sequences[0].loss_mask[-1], "the last observation is in the messages, not in the tokens"
    assert record.messages[-1]["content"] == "seen b"


async def test_an_environment_that_truncates_itself_is_truncated():
    record = await play(["a", "b"], Steps(1, truncated=True))

    assert record.stop_reason is StopReason.ENV_TRUNCATED
    assert record.truncated
    assert not record.terminated


@pytest.mark.parametrize("last", ["is_done", "step"])
async def test_done_after_the_first_call_asks_the_engine_no_more(last):
    env = Counter()

    record = await play([tool_call("tick"), "never"], env, {"done_after": 1})

    assert len(play.requests) == 1
    assert record.stop_reason is StopReason.ENV_DONE
    assert record.terminated
    assert not record.truncated
    assert record.sequences[0].loss_mask[-1]
    assert record.turns[0].tool_results[0].text == "0 left"
    assert env.finishes == ["env_done"]
    assert record.reward == 1.0


async def test_with_explain_the_model_is_told_and_answers_once_more():
    env = Counter()

    record = await play(
        [tool_call("tick"), "It is over." + tool_call("tick"), "never"],
        env,
        {"done_after": 1},
        done_policy="explain",
    )

    assert len(play.requests) == 2
    assert "has finished" in play.requests[1].prompt_text
    assert record.stop_reason is StopReason.ENV_DONE
    assert record.answer == "It is over."
    assert record.turns[1].tool_results[0].error_kind == "not_run"
    assert record.metrics["tool_calls"] == 1
    assert env.finishes == ["env_done"]


async def test_explain_without_a_turn_or_room_left_is_still_done():
    script = [tool_call("tick"), "over"]
    no_turn = await play(script, Counter(), {"done_after": 1}, done_policy="explain", max_turns=1)
    await play(script, Counter(), {"done_after": 1})
    prompt = len(play.requests[0].prompt_ids)
    room = prompt + len(TOKENIZER.encode(tool_call("tick"))) + 30
    no_room = await play(script, Counter(), {"done_after": 1}, done_policy="explain", max_context_tokens=room)

    assert no_turn.stop_reason is StopReason.MAX_TURNS, "the last turn's call is not run"
    assert no_room.stop_reason is StopReason.ENV_DONE
    assert len(play.requests) == 1


async def test_a_model_that_always_calls_is_stopped_by_max_turns():
    env = Counter()

    record = await play([tool_call("tick")] * 9, env, max_turns=2)

    assert record.stop_reason is StopReason.MAX_TURNS
    assert record.truncated
    assert not record.terminated
    assert env.finishes == ["max_turns"]
    assert env.left == 98
    assert [message["role"] for message in record.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]


@pytest.mark.parametrize(
    ("of_run", "of_environment", "turns"),
    [(None, None, 16), (None, 20, 20), (18, 20, 18), (16, 20, 16), (20, 3, 3), (18, None, 18)],
)
async def test_the_turns_are_the_stricter_limit_and_16_where_nobody_has_one(of_run, of_environment, turns):
    engine = ScriptedEngine([tool_call("tick")] * 21, tokenizer=TOKENIZER)
    runner = Runner(engine, RENDERER, RunLimits(max_turns=of_run))
    spec = EnvSpec.of("test/Counter-v0", Counter, max_turns=of_environment)
    async with runner.stage(spec) as stage:
        (job,) = stage.jobs([{}])
        record = await stage.play(job)

    assert record.stop_reason is StopReason.MAX_TURNS
    assert len(record.turns) == turns


async def test_the_last_turn_s_text_is_a_final_answer_and_a_last_step_counts():
    answer = await play([tool_call("tick"), "done"], Counter(), max_turns=2)
    env = Steps(5)
    step = await play(["a", "b", "c"], env, max_turns=2)

    assert answer.stop_reason is StopReason.FINAL_ANSWER
    assert step.stop_reason is StopReason.MAX_TURNS
    assert env.said == ["a", "b"]
    assert step.turn_rewards == (0.5, 2.5)


async def test_when_the_user_ends_it_the_record_ends_on_a_sampled_token():
    user = ScriptedUser(["more", UserTurn("thanks, bye", done=True, reward=0.25)])

    record = await play(["a", "b", "c"], Talk(), user=user)

    assert record.stop_reason is StopReason.USER_DONE
    assert record.terminated
    assert record.messages[-1] == {"role": "user", "content": "thanks, bye"}
    sequence = record.sequences[0]
    assert sequence.loss_mask[-1]
    assert "thanks" not in RENDERER.decode(sequence.token_ids)
    assert record.turn_rewards == (0.0, 1.25)


async def test_max_turns_and_max_user_turns_count_apart_and_tools_use_neither():
    script = [tool_call("tick"), tool_call("tick"), "a", "b", "c"]
    users = await play(script, Talk(), user=ScriptedUser(["u"] * 9, opening="hello"), max_user_turns=1)
    none = await play(["a"], Talk(), user=ScriptedUser(["u"] * 9), max_user_turns=0)
    turns = await play(script, Talk(), user=ScriptedUser(["u"] * 9), max_turns=3)

    assert users.stop_reason is StopReason.MAX_USER_TURNS
    assert users.truncated
    assert len(users.turns) == 4
    assert users.metrics["user_turns"] == 1
    assert users.metrics["tool_calls"] == 2
    assert none.stop_reason is StopReason.MAX_USER_TURNS
    assert len(none.turns) == 1
    assert turns.stop_reason is StopReason.MAX_TURNS
    assert turns.metrics["user_turns"] == 1


async def test_a_user_is_asked_only_where_the_environment_says_nothing():
    """One answer to each turn, from the environment if it has one."""

    class Desk(Env):
        def reset(self, *, seed=None, options=None):
            return "hello", {}

        def step(self, action: str):
            return ("the desk is closed" if action == "open?" else None), 0.0, False, False, {}

    heard = []

    def answer(messages, task):
        heard.append(messages[-1]["content"])
        return "thanks"

    record = await play(["open?", "bye", "x"], Desk(), user=FunctionUser(answer), max_turns=3)

    said = [message["content"] for message in record.messages]
    assert said[:6] == ["hello", "open?", "the desk is closed", "bye", "thanks", "x"]
    assert heard == ["bye", "x"]


async def test_users_reward_turns_and_give_rewards_back_to_earlier_ones():

    def judge(messages, task):
        spoken = sum(message["role"] == "assistant" for message in messages)
        if spoken == 3:
            return UserTurn(done=True, reward=1.0, turn_rewards={0: 0.1})
        return UserTurn("go on")

    record = await play(["a", "b", "c"], Talk(), user=FunctionUser(judge))

    assert record.turn_rewards == (0.1, 0.0, 2.0)
    last = [turn.end - 1 for turn in record.turns]
    mask, index = record.sequences[0].loss_mask, record.sequences[0].turn_index
    assert all(mask[place] and index[place] == turn for turn, place in enumerate(last))
    assert all(place + 1 == len(mask) or not mask[place + 1] for place in last)


async def test_a_user_that_rewards_a_turn_not_played_is_an_error_of_the_user():
    record = await play(
        ["a"], Talk(), user=FunctionUser(lambda messages, task: UserTurn("x", turn_rewards={7: 1.0}))
    )

    assert record.stop_reason is StopReason.ERROR
    assert record.error.boundary == "user"
    assert "turn 7" in record.error.message


async def test_each_task_may_have_another_user_and_each_episode_a_fresh_one():
    shared = ScriptedUser(["only line"])
    by_task = {"a": shared, "b": None}
    engine = ScriptedEngine(["hi"], tokenizer=TOKENIZER, repeat_last=True)
    runner = Runner(engine, RENDERER, RunLimits(max_turns=4), options=RunnerOptions(retries=0))

    class Free(Talk):
        def start(self, who: str) -> str:
            super().start()
            return who

    records = [
        await runner.run_episode(Free(), {"who": who}, user=lambda task: by_task[task["who"]])
        for who in ("a", "a", "b")
    ]

    assert [record.stop_reason for record in records[:2]] == [StopReason.USER_DONE] * 2
    assert records[0].metrics["user_turns"] == records[1].metrics["user_turns"] == 2


@pytest.mark.parametrize("fate", ["normal", "error", "deadline", "aborted"])
async def test_user_and_environment_are_closed_exactly_once(fate):
    closed = []

    class Closing(User):
        async def respond(self, messages):
            if fate == "error":
                raise ValueError("user broke")
            if fate == "deadline":
                import asyncio

                await asyncio.Event().wait()
            return UserTurn(done=True)

        async def close(self):
            closed.append(self)

    env = Talk()
    engine = ["a"] if fate != "aborted" else []
    record = await play(engine, env, user=Closing(), episode_timeout_s=0.2 if fate == "deadline" else None)

    expected = {"normal": "user_done", "error": "error", "deadline": "deadline", "aborted": "aborted"}
    assert record.stop_reason == expected[fate]
    assert len(closed) == 1
    assert env.closed == 1


async def test_rewards_see_a_draft_without_reward_fields():
    seen = []

    class Judged(Counter):
        def reward(self, trajectory: Trajectory) -> float:
            seen.append(trajectory)
            return 1.0

    record = await play([tool_call("tick"), "done"], Judged())

    (draft,) = seen
    assert draft.reward is None
    assert draft.turn_rewards == (0.0, 0.0)
    assert draft.rewards == {}
    assert draft.stop_reason is StopReason.FINAL_ANSWER
    assert draft.messages == record.messages
    assert draft.sequences == record.sequences
    assert record.reward == 1.0


async def test_an_episode_that_cannot_be_scored_has_no_reward_and_is_not_usable():
    class Unscored(Counter):
        def reward(self):
            return {"judge": None}

    record = await play([tool_call("tick"), "done"], Unscored())

    assert record.reward is None
    assert record.stop_reason is StopReason.FINAL_ANSWER
    assert record.error is None


async def test_a_score_hook_adds_to_the_environment_s_reward():
    async def score(draft, env, task):
        return len(draft.turns) / 4, {"brevity": 0.5}

    engine = ScriptedEngine([tool_call("tick"), "done"], tokenizer=TOKENIZER)
    record = await Runner(engine, RENDERER).run_episode(Counter(), {}, score=score)

    assert record.reward == 1.5
    assert record.rewards == {"brevity": 0.5}
    assert record.turn_rewards == (0.0, 1.5)


async def test_timings_say_where_the_time_went():
    record = await play([tool_call("tick"), "done"], Counter())

    names = {"generate_s", "queue_s", "env_s", "tools_s", "user_s", "render_s"}
    assert names | {"total_s", "reward_s"} == set(record.timings)
    assert all(set(turn.timings) == names for turn in record.turns)
    parts = sum(seconds for name, seconds in record.timings.items() if name != "total_s")
    assert 0 < parts <= record.timings["total_s"]
    assert record.turns[0].timings["tools_s"] > 0 == record.turns[1].timings["tools_s"]
