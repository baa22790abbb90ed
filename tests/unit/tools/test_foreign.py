"""Tools of other libraries, made by their own decorators where they are installed (`make test-agents`)."""

import importlib
import json

import pytest

import agentenv as ae
from agentenv.core import ToolDefinitionError
from agentenv.tools import Toolbox


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: First.
        b: Second.
    """
    return a + b


def module(name):
    return pytest.importorskip(name, reason=f"UNTESTED: {name} is not installed")


def smolagents():
    return module("smolagents").tool(add)


def smolagents_class():
    class Add(module("smolagents").Tool):
        name = "add"
        description = "Add two numbers."
        inputs = {  # noqa: RUF012 - as the library has it
            "a": {"type": "integer", "description": "First."},
            "b": {"type": "integer", "description": "Second.", "nullable": True},
        }
        output_type = "integer"

        def forward(self, a: int, b: int | None = None) -> int:
            return a + (b or 2)

    return Add()


def langchain():
    return module("langchain_core.tools").tool(add, parse_docstring=True)


def langchain_async():
    async def later(a: int, b: int = 2) -> int:
        return add(a, b)

    later.__name__, later.__doc__ = add.__name__, add.__doc__
    return module("langchain_core.tools").tool(later, parse_docstring=True)


def openai_agents():
    return module("agents.tool").function_tool(add, strict_mode=False)


def pydantic_ai():
    return module("pydantic_ai").Tool(add)


def inspect():
    module("inspect_ai")
    made = importlib.import_module("inspect_ai.tool").tool

    @made(name="add")
    def adder():
        async def execute(a: int, b: int = 2):
            return add(a, b)

        execute.__doc__ = add.__doc__
        return execute

    return adder()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "made", [smolagents, smolagents_class, langchain, langchain_async, openai_agents, pydantic_ai, inspect]
)
async def test_a_tool_of_another_library_is_a_tool(made):
    box = Toolbox([made()])
    function = box.schemas()[0]["function"]
    calls = [ae.ToolCall("1", "add", json.dumps(given)) for given in ({"a": 1}, {"a": 1, "b": 3}, {"a": "x"})]

    results = [(await box.run([call]))[0] for call in calls]

    properties = function["parameters"]["properties"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert [given["description"] for given in properties.values()] == ["First.", "Second."]
    assert function["parameters"]["required"] == ["a"]
    assert [result.content for result in results[:2]] == ["3", "4"]
    assert "a: should be a valid integer" in results[2].content


@pytest.mark.filterwarnings("ignore")
def test_an_environment_takes_tools_of_another_library():
    class Adder(ae.ToolEnv):
        tools = (langchain(),)

        def start(self):
            return "What is 1 + 2?"

        def reward(self, answer):
            return float("3" in answer)

    assert [schema["function"]["name"] for schema in Adder().tool_schemas] == ["add"]


def test_a_tool_that_needs_its_own_agent_is_refused():
    pydantic = module("pydantic_ai")

    def look(ctx, key: str) -> str:
        return key

    look.__annotations__["ctx"] = pydantic.RunContext[int]
    with pytest.raises(ToolDefinitionError, match=r"takes a RunContext.*agentenv\.Context"):
        Toolbox([pydantic.Tool(look)])
    with pytest.raises(ToolDefinitionError, match=r"toolset\.tools\.values"):
        Toolbox([importlib.import_module("pydantic_ai.toolsets").FunctionToolset()])


def test_a_tool_of_an_unknown_library_is_refused_with_what_to_do():
    class Foreign:
        name = "add"
        description = "Add two numbers."

    with pytest.raises(ToolDefinitionError, match=r"Foreign is a tool of another library.*from_schema"):
        Toolbox([Foreign()])
