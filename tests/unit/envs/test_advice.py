"""What an author most likely forgot is told once for a class, and nothing is told where all is well."""

import pytest

import agentenv as ae
from agentenv.core import Context
from agentenv.envs import AgentEnv, EnvSpec, ToolEnv


def shop(first="What does a pen cost?", mark=lambda method: method, **attributes):
    class Shop(ToolEnv):
        def start(self):
            return first

        def price(self, item: str) -> float:
            "Price."
            return 1.0

        def reward(self, answer):
            return 1.0

    Shop.price = mark(Shop.price)
    return type(
        "Shop", (Shop,), {name: value for name, value in vars(Shop).items() if name[:2] != "__"} | attributes
    )


async def told(kind, caplog):
    for _ in range(2):
        env = kind()
        await env.begin({}, seed=0, context=Context())
        await env.end("final_answer")
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("first", [None, ""])
async def test_a_start_that_returns_nothing_is_told_once(caplog, first):
    assert await told(shop(first, ae.tool), caplog) == [
        "Shop.start() returned nothing, so the model is given no task"
    ]


async def test_methods_that_are_not_marked_are_named_where_no_tool_is(caplog):
    (advice,) = await told(shop(), caplog)

    assert "has no tools" in advice
    assert "@ae.tool (it has price)" in advice


@pytest.mark.parametrize("kind", [shop(mark=ae.tool), shop(tools=("calculator",)), shop(mark=lambda _: 3)])
async def test_nothing_is_told_where_all_is_well(caplog, kind):
    assert await told(kind, caplog) == []


@pytest.mark.parametrize("answer", [None, "It is 3."])
async def test_an_agent_that_returns_no_answer_is_told_what_is_scored(caplog, answer):
    class Silent(AgentEnv):
        async def agent(self, url, task):
            return answer

        def reward(self, answer):
            return 1.0

    env = Silent()
    await env.begin({}, seed=0, context=Context())
    await env.run_agent("http://127.0.0.1:1")
    await env.shutdown()

    advice = [record.getMessage() for record in caplog.records]
    assert [text.startswith("Silent.agent() returned nothing") for text in advice] == [True] * (
        answer is None
    )


@pytest.mark.parametrize(
    ("rows", "number"),
    [
        ([{"q": "a"}, {"q": "a"}], 1),
        ([{"q": "a", "id": "1"}, {"q": "a", "id": "2"}], 0),
        ([{"q": "a"}, {"q": "b"}], 0),
        ([{}, {}], 0),
        ([{"q": "a"}], 0),
    ],
)
def test_tasks_that_are_all_alike_are_told(caplog, rows, number):
    ae.evaluate(EnvSpec.of("told/Alike-v0", shop(mark=ae.tool, start=lambda self, q="": "Go."), tasks=rows))

    assert len([one for one in caplog.records if "are alike" in one.getMessage()]) == number
