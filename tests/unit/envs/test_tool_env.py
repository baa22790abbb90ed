"""Environments made of tools."""

import copy
import pickle

import pytest

from agentenv.core import Action, Context, TaskError, ToolErrorKind, UsageError
from agentenv.envs import EnvSpec, TaskSet, ToolEnv, make
from agentenv.envs.rewards import Reward
from agentenv.tools import tool


@tool
def double(a: int) -> int:
    """Double a number."""
    return 2 * a


class Adder(ToolEnv):
    """Adds two numbers."""

    def start(self, x: int, y: int) -> str:
        self.want = x + y
        return f"What is {x} + {y}?"

    @tool
    def add(self, a: int, b: int) -> int:
        "Add two numbers."
        return a + b

    def close(self):
        return None

    def is_done(self):
        return False

    def reward(self, answer: str) -> float:
        return float(str(self.want) in answer)


def call(name, arguments, id="c0"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls):
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


async def begun(env, task, **context):
    await env.begin(task, seed=0, context=Context(**context))
    return env


async def scored(env, task, *answers, **context):
    """Play answers, and return what the episode is worth."""
    await begun(env, task, **context)
    for answer in answers:
        await env.advance(Action.of({"role": "assistant", "content": answer}))
    return await env.end("final_answer")


def made(kind, **fields):
    return EnvSpec.of("demo/Made-v0", kind, **fields).make()


def rewarding(method, kind=Adder):
    return type("Odd", (kind,), {"reward": method})()


def test_an_episode_through_the_front():
    env = make(Adder)

    first, _ = env.reset(options={"task": {"x": 3, "y": 4}})
    answers, reward, terminated, *_ = env.step(calling(call("add", '{"a": 3, "b": 4}')))
    rest, last, ended, _, info = env.step("It is 7.")

    assert first == [{"role": "user", "content": "What is 3 + 4?"}]
    assert answers == [{"role": "tool", "tool_call_id": "c0", "name": "add", "content": "7"}]
    assert (reward, terminated) == (0.0, False)
    assert (rest, last, ended, info["stop_reason"]) == ([], 1.0, True, "final_answer")


async def test_tools_from_elsewhere_stand_beside_the_marked_methods():
    class More(Adder):
        tools = (double,)

    env = await begun(More(), {"x": 1, "y": 1})
    result = await env.advance(
        Action.of(calling(call("double", '{"a": 4}', "p"), call("add", '{"a": 1, "b": 1}', "q")))
    )

    assert [(r.tool_call_id, r.content) for r in result.tool_results] == [("p", "8"), ("q", "2")]


async def test_mistakes_of_the_model_are_answered_and_do_not_end_the_episode():
    env = await begun(Adder(), {"x": 1, "y": 1})
    result = await env.advance(Action.of(calling(call("nope", "{}", "p"), call("add", '{"a": 1}', "q"))))

    kinds = [one.error_kind for one in result.tool_results]
    assert kinds == [ToolErrorKind.UNKNOWN_TOOL, ToolErrorKind.BAD_ARGUMENTS]
    assert not result.terminated


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"x": 1}, r"task row-a lacks the field 'y'.*it has: id, x"),
        ({"x": 1, "y": 2, "yy": 3}, r"task row-a has the field 'yy'.*did you mean 'y'"),
        (None, r"it has: no fields: register the environment with tasks=\[\{'x'"),
    ],
)
async def test_a_wrong_field_is_named_with_its_row(task, words):
    with pytest.raises(TaskError, match=words):
        await begun(Adder(), TaskSet.of([{"id": "row-a", **task}])[0].data if task else {})


async def test_start_and_reward_may_be_asynchronous_and_ask_for_more():
    """A field that the reward alone reads is known, too."""
    seen = {}

    class Asks(ToolEnv):
        async def start(self, context, state, seed, task, **fields):
            state["begun"] = True
            seen.update(seed=seed, fields=fields, task=task, context=context)
            return "go"

        async def reward(self, answer, messages, stop_reason, env, state, task, x):
            seen.update(answer=answer, roles=[m["role"] for m in messages], stop=stop_reason, x=x)
            assert env is self
            return {"right": 1.0, "format": 0.5} if state["begun"] else None

    env = Asks()
    outcome = await scored(env, {"x": 9}, "done")

    given = {"seed": 0, "fields": {"x": 9}, "task": {"x": 9}, "context": env.context}
    said = {"answer": "done", "roles": ["user", "assistant"], "stop": "final_answer", "x": 9}
    assert seen == given | said
    assert (outcome.reward, outcome.rewards) == (1.5, {"right": 1.0, "format": 0.5})


async def test_the_runners_record_is_what_rewards_judge():
    class Record:
        messages = ({"role": "user", "content": "shown"},)
        answer = "shown answer"

    def reward(self, answer, messages, trajectory):
        assert isinstance(trajectory, Record)
        return float(answer == "shown answer" and messages == [{"role": "user", "content": "shown"}])

    assert (await scored(rewarding(reward), {"x": 1, "y": 2}, draft=Record)).reward == 1.0


async def test_turn_rewards_of_tools_belong_to_their_turn():
    class Paid(ToolEnv):
        def start(self):
            return "go"

        @tool
        def dig(self) -> str:
            "Dig."
            self.add_turn_reward(0.25)
            return "dirt"

    env = await begun(Paid(), {})
    twice = await env.advance(Action.of(calling(call("dig", "{}", "a"), call("dig", "{}", "b"))))
    none = await env.advance(Action.of({"role": "assistant", "content": "tired"}))

    assert (twice.reward, none.reward) == (0.5, 0.0)


async def test_named_and_weighted_rewards_of_a_specification_are_added():
    def short(answer):
        return len(answer) < 20

    async def polite(answer, task):
        return {"please": "please" in answer, "thanks": 0.5}

    env = made(Adder, rewards=[short, (polite, 0.5), Reward(lambda answer: 3.0, weight=0.0, name="watched")])
    outcome = await scored(env, {"x": 1, "y": 2}, "3 please")

    parts = {"short": 1.0, "polite": 1.5, "polite/please": 1.0, "polite/thanks": 0.5, "watched": 3.0}
    assert (outcome.reward, outcome.rewards) == (1.0 + 1.0 + 0.5 * 1.5, parts)

    unscored = made(Adder, rewards=[lambda answer: None])
    assert (await scored(unscored, {"x": 1, "y": 2}, "3")).reward is None


def with_a_yield(self):
    yield 1.0


async def with_an_async_yield(self):
    yield 1.0


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        *((lambda self, value=value: value, "finite|number") for value in (float("inf"), "1.0", object())),
        (with_a_yield, "has a yield, .* return the value"),
        (with_an_async_yield, "has a yield, .* return the value"),
        (lambda self, anser: 0.0, "'anser'.*did you mean 'answer'"),
    ],
)
async def test_a_reward_that_is_none_is_refused(reward, words):
    with pytest.raises(UsageError, match=words):
        await scored(rewarding(reward), {"x": 1, "y": 2})


def test_it_can_be_copied_pickled_and_restored():
    env = make(Adder)
    env.reset(options={"task": {"x": 3, "y": 4}})
    saved = env.unwrapped.snapshot()
    twins = [copy.deepcopy(env), pickle.loads(pickle.dumps(env))]
    env.step("7")
    env.unwrapped.restore(saved)

    for one in (env, *twins):
        answers, *_ = one.step(calling(call("add", '{"a": 1, "b": 1}')))
        assert answers[0]["content"] == "2"
        assert one.step("7")[1] == 1.0


def test_an_environment_without_start_says_so():
    with pytest.raises(UsageError, match=r"no start\(\)"):
        make(type("Empty", (ToolEnv,), {})).reset()
