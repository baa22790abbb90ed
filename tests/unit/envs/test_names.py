"""Names of tools and methods: a tool may have any name, and what the core calls is a method."""

from __future__ import annotations

import logging
from functools import cached_property

import pytest

from agentenv.core import StopReason, UsageError
from agentenv.envs import Env, EnvSpec, ToolEnv
from agentenv.runner import Runner, ScriptedUser, UserTurn
from agentenv.testing import tool_call
from agentenv.tools import tool
from scenes import runner

NAMES = sorted(name for name in dir(ToolEnv) if not name.startswith("_"))


def scripted(*script: str) -> Runner:
    return runner(list(script), retries=0)


def named(name: str):
    def function(number: int) -> int:
        "Add one."
        return number + 1

    return tool(name=name)(function)


def with_tool(name: str, *bases: type) -> type[ToolEnv]:
    class Plain(ToolEnv):
        def start(self) -> str:
            return f"try {sorted(self.context.state)}"

        def reward(self) -> float:
            return 2.0

    return type("Named", (*bases, Plain), {} if bases else {name: named(name)})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("from_mixin", [False, True], ids=["own", "mixin"])
async def test_a_tool_may_have_the_name_of_anything_that_an_environment_has(name, from_mixin):
    bases = (type("Mixin", (), {name: named(name)}),) if from_mixin else ()

    record = await scripted(tool_call(name, number=1), "done").run_episode(with_tool(name, *bases)(), {})

    assert record.stop_reason is StopReason.FINAL_ANSWER, record.error
    assert record.turns[0].tool_results[0].content == "2"
    assert record.reward == 2.0


def test_moved_tools_keep_the_order_of_their_definition():
    class Ordered(ToolEnv):
        first = named("first")
        end = named("end")
        step = named("step")
        last = named("last")

    assert Ordered().toolbox.names == ("first", "end", "step", "last")


def test_a_subclass_replaces_a_moved_tool():
    class Base(ToolEnv):
        end = named("end")

    class Sub(Base):
        @tool
        def end(self) -> str:
            "Stop."
            return "stopped"

    assert Sub().toolbox.names == ("end",)
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
    class Sets(ToolEnv):
        def start(self) -> str:
            setattr(self, name, 1.0)
            return "go"

        @tool
        def work(self) -> str:
            "Do it."
            return "ok"

    record = await scripted(tool_call("work"), "done").run_episode(Sets(), {})

    assert record.error.boundary == boundary
    assert f"self.{name} is 1.0" in record.error.message


async def test_a_user_answers_also_if_the_spec_has_none():
    class Asks(ToolEnv):
        def start(self) -> str:
            return "go"

        def reward(self) -> float:
            return 1.0

    user = ScriptedUser(["more", UserTurn("bye", done=True)])
    spec = EnvSpec.of("test/Asks-v0", Asks, tasks=[{}])

    alone = await scripted("a", "b").run_episode(Asks(), {}, user=user)
    groups = [group async for group in scripted("a", "b").run_groups(spec, [{}], user=user)]

    for record in (alone, groups[0].trajectories[0]):
        assert record.stop_reason is StopReason.USER_DONE
        said = [message["content"] for message in record.messages if message["role"] == "user"]
        assert said == ["go", "more", "bye"]


async def test_an_environment_without_any_reward_says_so_once(caplog):
    class Unscored(ToolEnv):
        def start(self) -> str:
            return "go"

    class Scored(Unscored):
        def reward(self) -> float:
            return 0.0

    class OfItsTools(Unscored):
        @tool
        def work(self) -> str:
            "Do it."
            self.add_turn_reward(0.0)
            return "ok"

    with caplog.at_level(logging.WARNING):
        for entry in (Unscored, Unscored, Scored, OfItsTools):
            await scripted(tool_call("work"), "done").run_episode(entry(), {})
        for fields in ({"rewards": [lambda: 0.0]}, {"user": ScriptedUser([])}):
            spec = EnvSpec.of("test/Other-v0", type("Other", (Unscored,), {}), tasks=[{}], **fields)
            assert [group async for group in scripted("a", "b").run_groups(spec, [{}])]

    told = [record.getMessage() for record in caplog.records if "has no reward" in record.getMessage()]
    assert [text.split()[0] for text in told] == ["Unscored"]
