"""Names of tools and methods: a tool may have any name, and what the core calls is a method."""

from __future__ import annotations

import logging
from functools import cached_property

import pytest

from agentenv.core import StopReason, UsageError
from agentenv.envs import Env, ToolEnv
from agentenv.runner import Runner, ScriptedUser, UserTurn
from agentenv.testing import tool_call
from agentenv.tools import tool
from scenes import Go, groups_of, runner, spec_of


def scripted(*script: str) -> Runner:
    return runner(list(script), retries=0)


class Unscored(ToolEnv):
    def start(self) -> str:
        return f"try {sorted(self.context.state)}"

    @tool
    def work(self) -> str:
        "Do it."
        return "ok"


def named(name: str):
    def function(number: int) -> int:
        "Add one."
        return number + 1

    return tool(name=name)(function)


@pytest.mark.parametrize("name", sorted(name for name in dir(ToolEnv) if not name.startswith("_")))
@pytest.mark.parametrize("from_mixin", [False, True], ids=["own", "mixin"])
async def test_a_tool_may_have_the_name_of_anything_that_an_environment_has(name, from_mixin):
    own = {name: named(name)}
    scored = type("Scored", (Unscored,), {"reward": lambda self: 2.0})
    bases, members = ((type("Mixin", (), own), scored), {}) if from_mixin else ((scored,), own)

    record = await scripted(tool_call(name, number=1), "done").run_episode(type("X", bases, members)(), {})

    assert record.stop_reason is StopReason.FINAL_ANSWER, record.error
    assert record.turns[0].tool_results[0].content == "2"
    assert record.reward == 2.0


def test_moved_tools_keep_their_order_and_are_replaced_by_a_subclass():
    class Base(ToolEnv):
        first = named("first")
        end = named("end")
        step = named("step")
        last = named("last")

    class Sub(Base):
        @tool
        def end(self) -> str:
            "Stop."
            return "stopped"

    assert Base().toolbox.names == Sub().toolbox.names == ("first", "end", "step", "last")
    assert Sub().toolbox["end"].description == "Stop."


@pytest.mark.parametrize("name", ["is_done", "finish", "close", "step", "reset", "reward", "start"])
@pytest.mark.parametrize("make", [property, cached_property, lambda function: 1.0, lambda function: None])
def test_what_the_environment_calls_must_be_a_method(name, make):
    with pytest.raises(UsageError, match=f"write it as a method: def {name}"):
        type("Wrong", (ToolEnv,), {name: make(lambda self: True)})


@pytest.mark.parametrize("name", ["begin", "advance", "is_finished", "end", "shutdown"])
def test_a_method_that_hides_one_of_the_runner_is_refused(name):
    with pytest.raises(UsageError, match=f"hides the method {name}"):
        type("Wrong", (Env,), {name: lambda self: None})


@pytest.mark.parametrize(("name", "boundary"), [("is_done", "env"), ("reward", "reward")])
async def test_a_value_in_the_place_of_a_method_is_told(name, boundary):
    class Sets(Unscored):
        def start(self) -> str:
            setattr(self, name, 1.0)
            return "go"

    record = await scripted(tool_call("work"), "done").run_episode(Sets(), {})

    assert record.error.boundary == boundary
    assert f"self.{name} is 1.0" in record.error.message


async def test_a_user_answers_also_if_the_spec_has_none():
    user = ScriptedUser(["more", UserTurn("bye", done=True)])

    alone = await scripted("a", "b").run_episode(Go(), {}, user=user)
    (group,) = await groups_of(scripted("a", "b"), Go, user=user)

    for record in (alone, group.trajectories[0]):
        assert record.stop_reason is StopReason.USER_DONE
        said = [message["content"] for message in record.messages if message["role"] == "user"]
        assert said == ["go", "more", "bye"]


async def test_an_environment_without_any_reward_says_so_once(caplog):
    class OfItsTools(Unscored):
        @tool
        def work(self) -> str:
            "Do it."
            self.add_turn_reward(0.0)
            return "ok"

    with caplog.at_level(logging.WARNING):
        for entry in (Unscored, Unscored, Go, OfItsTools):
            await scripted(tool_call("work"), "done").run_episode(entry(), {})
        for fields in ({"rewards": [lambda: 0.0]}, {"user": ScriptedUser([])}):
            other = type("Other", (Unscored,), {})
            assert await groups_of(scripted("a", "b"), spec_of(other, **fields))

    told = [record.getMessage() for record in caplog.records if "has no reward" in record.getMessage()]
    assert [text.split()[0] for text in told] == ["Unscored"]
