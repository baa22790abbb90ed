"""Ends: terminated, truncated and done told apart, seen by the environment, and rewarded once."""

from __future__ import annotations

import pytest

from agentenv.core import Trajectory
from agentenv.envs import Env
from agentenv.runner import FunctionUser, ScriptedUser, UserTurn
from agentenv.testing import tool_call
from agentenv.tools import tool
from scenes import RENDERER, TOKENIZER, Go, groups_of, runner, spec_of
from scenes import play as play_in_scene

TICK = tool_call("tick")


class Counter(Go):
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


class Talk(Counter):
    ends_on_text = False


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


async def play(env, script, task=None, **settings) -> Trajectory:
    record = await play_in_scene(env, script, task, **settings)
    assert record.reward is None or sum(record.turn_rewards) == record.reward
    return record


async def test_an_environment_that_ends_at_step_two_is_not_stepped_again():
    env = Steps(2)

    record = await play(env, ["a", "b", "c"], max_turns=10)

    assert (record.stop_reason, record.terminated, len(record.turns)) == ("env_terminated", True, 2)
    assert env.said == ["a", "b"]
    assert (record.turn_rewards, record.reward) == ((0.5, 2.5), 3.0)
    assert record.sequences[0].loss_mask[-1], "the last observation is in the messages, not in the tokens"
    assert record.messages[-1]["content"] == "seen b"


async def test_an_environment_that_truncates_itself_is_truncated():
    record = await play(Steps(1, truncated=True), ["a", "b"])

    assert (record.stop_reason, record.truncated, record.terminated) == ("env_truncated", True, False)


async def test_done_after_the_first_call_asks_the_engine_no_more():
    env = Counter()

    record = await play(env, [TICK, "never"], {"done_after": 1})

    assert (record.stop_reason, record.terminated, record.truncated) == ("env_done", True, False)
    assert (len(record.turns), record.reward, env.finishes) == (1, 1.0, ["env_done"])
    assert record.sequences[0].loss_mask[-1]
    assert record.turns[0].tool_results[0].text == "0 left"


async def test_with_explain_the_model_is_told_and_answers_once_more():
    env, playing = Counter(), runner([TICK, f"It is over.{TICK}", "never"])

    record = await playing.run_episode(env, {"done_after": 1}, done_policy="explain")

    _, last = playing.engine.requests
    assert "has finished" in last.prompt_text
    assert (record.stop_reason, record.answer) == ("env_done", "It is over.")
    assert record.turns[1].tool_results[0].error_kind == "not_run"
    assert record.metrics["tool_calls"] == 1
    assert env.finishes == ["env_done"]


async def test_explain_without_a_turn_or_room_left_is_still_done():
    options = {"task": {"done_after": 1}, "done_policy": "explain"}

    no_turn = await play(Counter(), [TICK, "over"], **options, max_turns=1)
    room = no_turn.turns[0].start + len(TOKENIZER.encode(TICK)) + 30
    no_room = await play(Counter(), [TICK, "over"], **options, max_context_tokens=room)

    assert no_turn.stop_reason == "max_turns", "the last turn's call is not run"
    assert (no_room.stop_reason, len(no_room.turns)) == ("env_done", 1)


async def test_a_model_that_always_calls_is_stopped_by_max_turns():
    env = Counter()

    record = await play(env, TICK, max_turns=2)

    assert (record.stop_reason, record.truncated, record.terminated) == ("max_turns", True, False)
    assert (env.finishes, env.left) == (["max_turns"], 98)
    roles = [message["role"] for message in record.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]


@pytest.mark.parametrize(
    ("of_run", "of_environment", "turns"),
    [(None, None, 16), (None, 20, 20), (18, 20, 18), (16, 20, 16), (20, 3, 3), (18, None, 18)],
)
async def test_the_turns_are_the_stricter_limit_and_16_where_nobody_has_one(of_run, of_environment, turns):
    spec = spec_of(Counter, max_turns=of_environment)

    ((record,),) = await groups_of(runner(TICK, max_turns=of_run), spec)

    assert (record.stop_reason, len(record.turns)) == ("max_turns", turns)


async def test_the_last_turn_s_text_is_a_final_answer_and_a_last_step_counts():
    env = Steps(5)

    answer = await play(Counter(), [TICK, "done"], max_turns=2)
    step = await play(env, ["a", "b", "c"], max_turns=2)

    assert answer.stop_reason == "final_answer"
    assert (step.stop_reason, env.said, step.turn_rewards) == ("max_turns", ["a", "b"], (0.5, 2.5))


async def test_when_the_user_ends_it_the_record_ends_on_a_sampled_token():
    user = ScriptedUser(["more", UserTurn("thanks, bye", done=True, reward=0.25)])

    record = await play(Talk(), ["a", "b", "c"], user=user)

    (sequence,) = record.sequences
    assert (record.stop_reason, record.terminated) == ("user_done", True)
    assert record.messages[-1] == {"role": "user", "content": "thanks, bye"}
    assert sequence.loss_mask[-1]
    assert "thanks" not in RENDERER.decode(sequence.token_ids)
    assert record.turn_rewards == (0.0, 1.25)


@pytest.mark.parametrize(
    ("script", "opening", "limits", "turns", "user_turns"),
    [
        ([TICK, TICK, "a", "b", "c"], "hello", {"max_user_turns": 1}, 4, 1),
        (["a"], None, {"max_user_turns": 0}, 1, 0),
        ([TICK, TICK, "a", "b", "c"], None, {"max_turns": 3}, 3, 1),
    ],
)
async def test_max_turns_and_max_user_turns_count_apart_and_tools_use_neither(
    script, opening, limits, turns, user_turns
):
    record = await play(Talk(), script, user=ScriptedUser(["u"] * 9, opening=opening), **limits)

    assert (record.stop_reason, record.truncated) == (next(iter(limits)), True)
    assert (len(record.turns), record.metrics["user_turns"]) == (turns, user_turns)
    assert record.metrics["tool_calls"] == script.count(TICK)


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

    record = await play(Desk(), ["open?", "bye", "x"], user=FunctionUser(answer), max_turns=3)

    said = [message["content"] for message in record.messages]
    assert said[:6] == ["hello", "open?", "the desk is closed", "bye", "thanks", "x"]
    assert heard == ["bye", "x"]


async def test_users_reward_turns_and_give_rewards_back_to_earlier_ones():
    def judge(messages, task):
        spoken = sum(message["role"] == "assistant" for message in messages)
        return UserTurn(done=True, reward=1.0, turn_rewards={0: 0.1}) if spoken == 3 else UserTurn("go on")

    record = await play(Talk(), ["a", "b", "c"], user=FunctionUser(judge))

    assert record.turn_rewards == (0.1, 0.0, 2.0)
    last = [turn.end - 1 for turn in record.turns]
    mask, index = record.sequences[0].loss_mask, record.sequences[0].turn_index
    assert all(mask[place] and index[place] == turn for turn, place in enumerate(last))
    assert all(place + 1 == len(mask) or not mask[place + 1] for place in last)


async def test_a_user_that_rewards_a_turn_not_played_is_an_error_of_the_user():
    user = FunctionUser(lambda messages, task: UserTurn("x", turn_rewards={7: 1.0}))

    record = await play(Talk(), ["a"], user=user)

    assert (record.stop_reason, record.error.boundary) == ("error", "user")
    assert "turn 7" in record.error.message


async def test_each_task_may_have_another_user_and_each_episode_a_fresh_one():
    by_task = {98: ScriptedUser(["only line"]), 99: None}
    playing, tasks = runner("hi", max_turns=4, retries=0), [{"done_after": n} for n in (98, 98, 99)]

    first, again, _ = [
        await playing.run_episode(Talk(), task, user=lambda task: by_task[task["done_after"]])
        for task in tasks
    ]

    assert first.stop_reason == again.stop_reason == "user_done"
    assert first.metrics["user_turns"] == again.metrics["user_turns"] == 2


async def test_rewards_see_a_draft_without_reward_fields():
    seen = []

    class Judged(Counter):
        def reward(self, trajectory: Trajectory) -> float:
            seen.append(trajectory)
            return 1.0

    record = await play(Judged(), [TICK, "done"])

    (draft,) = seen
    assert (draft.reward, draft.turn_rewards, draft.rewards) == (None, (0.0, 0.0), {})
    assert (draft.stop_reason, draft.messages) == ("final_answer", record.messages)
    assert draft.sequences == record.sequences
    assert record.reward == 1.0


async def test_an_episode_that_cannot_be_scored_has_no_reward_and_is_not_usable():
    class Unscored(Counter):
        def reward(self):
            return {"judge": None}

    record = await play(Unscored(), [TICK, "done"])

    assert (record.reward, record.stop_reason, record.error) == (None, "final_answer", None)


async def test_a_score_hook_adds_to_the_environment_s_reward():
    async def score(draft, env, task):
        return len(draft.turns) / 4, {"brevity": 0.5}

    record = await play(Counter(), [TICK, "done"], score=score)

    assert (record.reward, record.rewards) == (1.5, {"brevity": 0.5})
    assert record.turn_rewards == (0.0, 1.5)


async def test_timings_say_where_the_time_went():
    record = await play(Counter(), [TICK, "done"])

    names = {"generate_s", "queue_s", "env_s", "tools_s", "user_s", "render_s"}
    assert names | {"total_s", "reward_s"} == set(record.timings)
    assert all(set(turn.timings) == names for turn in record.turns)
    parts = sum(seconds for name, seconds in record.timings.items() if name != "total_s")
    assert 0 < parts <= record.timings["total_s"]
    assert record.turns[0].timings["tools_s"] > 0 == record.turns[1].timings["tools_s"]
