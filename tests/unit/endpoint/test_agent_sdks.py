"""Real agents of other SDKs: what each does to its history leaves one sequence, with the tokens as sampled.

The SDKs are installed for `make test-agents`; here those that are missing are skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import agentenv as ae
from agentenv.core import StopReason
from helpers.agents import by_turn, call, check_one_sequence, check_tokens, served
from helpers.sdk_agents import QUESTION, THINKS, TURNS, add, check_linear, lookup, require, said

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the SDKs, which warn as they like
]
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


# Each agent is a function of the address and of whether to stream, which returns the agent's answer. ----------


TOOLS = {"add": add, "lookup": lookup}
SCHEMAS = [ae.Tool.from_function(made, name=name).schema() for name, made in TOOLS.items()]


async def litellm(url, stream):
    import litellm

    messages = [{"role": "user", "content": QUESTION}]
    while True:
        answer = await litellm.acompletion(
            "openai/m", messages, tools=SCHEMAS, stream=stream, api_base=f"{url}/v1", api_key="x"
        )
        if stream:
            answer = litellm.stream_chunk_builder([chunk async for chunk in answer])
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        messages += [
            {
                "role": "tool",
                "tool_call_id": made.id,
                "content": str(TOOLS[made.function.name](**json.loads(made.function.arguments))),
            }
            for made in message.tool_calls
        ]


async def openai_agents(url, stream, api, **options):
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as sdk:
        model = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[api]
        agent = agents.Agent(
            name="A",
            instructions="You add.",
            tools=[agents.function_tool(add), agents.function_tool(lookup)],
            model=model("m", sdk),
        )
        if not stream:
            return (await agents.Runner.run(agent, QUESTION, **options)).final_output
        running = agents.Runner.run_streamed(agent, QUESTION, **options)
        async for _ in running.stream_events():
            pass
        return running.final_output


async def pydantic_ai(url, stream, api):
    from pydantic_ai import Agent

    if api == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        model = AnthropicModel("m", provider=AnthropicProvider(api_key="x", base_url=url))
    else:
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[api]
        model = kind("m", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="x"))
    agent = Agent(model, instructions="You add.", tools=[add, lookup])
    if not stream:
        return (await agent.run(QUESTION)).output
    async with agent.iter(QUESTION) as run:
        async for node in run:
            if Agent.is_model_request_node(node):
                async with node.stream(run.ctx) as events:
                    async for _ in events:
                        pass
    return run.result.output


async def langgraph(url, stream, api):
    from langchain_core.messages import HumanMessage
    from langgraph.prebuilt import create_react_agent

    if api == "anthropic":
        from langchain_anthropic import ChatAnthropic

        model = ChatAnthropic(model="m", base_url=url, api_key="x", streaming=stream)
    else:
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(
            model="m",
            base_url=f"{url}/v1",
            api_key="x",
            streaming=stream,
            use_responses_api=api == "responses",
        )
    agent = create_react_agent(model, [add, lookup], prompt="You add.")
    state = await agent.ainvoke({"messages": [HumanMessage(QUESTION)]})
    return state["messages"][-1].text


async def anthropic_messages(url, stream):
    from anthropic import AsyncAnthropic

    tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in SCHEMAS
    ]
    messages = [{"role": "user", "content": QUESTION}]
    async with AsyncAnthropic(base_url=url, api_key="x") as sdk:
        while True:
            asked = {"model": "m", "max_tokens": 1000, "tools": tools, "messages": messages}
            if stream:
                async with sdk.messages.stream(**asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await sdk.messages.create(**asked)
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": made.id,
                    "content": str(TOOLS[made.name](**made.input)),
                }
                for made in answer.content
                if made.type == "tool_use"
            ]
            messages += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": results},
            ]
            if not results:
                return answer.content[-1].text


async def anthropic_runner(url, stream):
    from anthropic import AsyncAnthropic, beta_async_tool

    @beta_async_tool
    async def add_(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    @beta_async_tool
    async def lookup_(query: str, limit: float = 1.0) -> str:
        """Look up."""
        return "café ü"

    add_.name, lookup_.name = "add", "lookup"
    async with AsyncAnthropic(base_url=url, api_key="x") as sdk:
        running = sdk.beta.messages.tool_runner(
            model="m",
            max_tokens=1000,
            tools=[add_, lookup_],
            stream=stream,
            messages=[{"role": "user", "content": QUESTION}],
        )
        if not stream:
            return (await running.until_done()).content[-1].text
        async for events in running:
            async for _ in events:
                pass
            last = await events.get_final_message()
        return last.content[-1].text


async def inspect(url, stream, api):
    from inspect_ai.model import ChatMessageSystem, ChatMessageUser, GenerateConfig, get_model
    from inspect_ai.tool import ToolDef

    service = {"anthropic": ("anthropic/claude", url), "chat": ("openai-api/any/m", f"{url}/v1")}
    name, base = service[api]
    way = {"streaming" if api == "anthropic" else "stream": stream}
    config = GenerateConfig(max_tokens=2000)
    model = get_model(name, config=config, base_url=base, api_key="x", memoize=False, **way)
    messages = [ChatMessageSystem(content="You add."), ChatMessageUser(content=QUESTION)]

    async def add_(a: int, b: int) -> str:
        return str(add(a, b))

    async def lookup_(query: str, limit: float = 1.0) -> str:
        return lookup(query, limit)

    tools = [
        ToolDef(add_, "add", "Add two numbers.", {"a": "the first", "b": "the second"}),
        ToolDef(lookup_, "lookup", "Look up.", {"query": "what", "limit": "how much"}),
    ]
    async with model:
        _, output = await model.generate_loop(messages, tools=[tool.as_tool() for tool in tools])
    return output.completion


def over(run, api, **options):
    """The agent over one of the APIs."""
    return lambda url, stream: run(url, stream, api, **options)


AGENTS: dict[str, tuple[str, Callable[..., object]]] = {
    "inspect chat": ("inspect_ai", over(inspect, "chat")),
    "inspect anthropic": ("inspect_ai", over(inspect, "anthropic")),
    "openai-agents chat": ("agents", over(openai_agents, "chat")),
    "openai-agents responses": ("agents", over(openai_agents, "responses")),
    "openai-agents deltas": ("agents", over(openai_agents, "responses", auto_previous_response_id=True)),
    "pydantic-ai chat": ("pydantic_ai", over(pydantic_ai, "chat")),
    "pydantic-ai responses": ("pydantic_ai", over(pydantic_ai, "responses")),
    "pydantic-ai anthropic": ("pydantic_ai", over(pydantic_ai, "anthropic")),
    "langgraph chat": ("langgraph", over(langgraph, "chat")),
    "langgraph responses": ("langgraph", over(langgraph, "responses")),
    "langgraph anthropic": ("langgraph", over(langgraph, "anthropic")),
    "anthropic messages": ("anthropic", anthropic_messages),
    "anthropic threads": ("anthropic", anthropic_runner),
    "litellm chat": ("litellm", litellm),
}


@pytest.fixture(autouse=True)
def no_look_ups(monkeypatch):
    """litellm would fetch a list of prices."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")


@THINKS
@STREAM
@pytest.mark.parametrize("name", AGENTS)
async def test_a_linear_conversation_is_one_sequence(name, stream, thinks):
    package, run = AGENTS[name]
    require(package)
    await check_linear(lambda url: run(url, stream), thinks=thinks)


EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"
NEEDS = {
    "repair_with_mini_swe_agent": "minisweagent",
    "with_langgraph": "langgraph",
    "with_mini_swe_agent": "minisweagent",
    "with_openai": "openai",
    "with_openai_agents": "agents",
    "with_pydantic_ai": "pydantic_ai",
    "with_smolagents": "smolagents",
}


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_is_evaluated_as_any_environment(name):
    require(NEEDS[name])

    result = ae.evaluate(str(EXAMPLES / f"{name}.py"), "mock", num_tasks=3)

    # The mock's commands are drawn, and mini-swe-agent ends only with a certain one.
    ends = {StopReason.FINAL_ANSWER, StopReason.MAX_TURNS} if "repair" in name else {StopReason.FINAL_ANSWER}
    assert {summary.stop_reason for summary in result.summaries} <= ends
    assert len(result.summaries) == 3
    assert all(trajectory.sequences for group in result.groups for trajectory in group)


CODE = (
    "Thought: add ü\n<code>\nx = add(a=2,  b=3)\nprint(x)\n</code> \n",
    "Thought: end\n<code>\nfinal_answer(x+1)\n</code>",
)
SMOLAGENTS = {
    "ToolCallingAgent": ((*TURNS[:2], call('{"answer": "6"}', "final_answer")), "6"),
    "CodeAgent": (CODE, 6),
}


@THINKS
@STREAM
@pytest.mark.parametrize("kind", SMOLAGENTS)
async def test_an_agent_of_smolagents_is_one_sequence(kind, stream, thinks):
    smolagents = pytest.importorskip("smolagents")
    turns, answer = SMOLAGENTS[kind]

    def run(url):
        model = smolagents.OpenAIServerModel("m", api_base=f"{url}/v1", api_key="x")
        tools = [smolagents.tool(add), smolagents.tool(lookup)]
        options = {"max_steps": 4, "stream_outputs": stream, "verbosity_level": 0}
        return getattr(smolagents, kind)(tools=tools, model=model, **options).run(QUESTION)

    async with served(by_turn(*said(turns, thinks=thinks))) as agent:
        assert await asyncio.to_thread(run, agent.url) == answer

        check_one_sequence(agent, len(turns))


@THINKS
async def test_mini_swe_agent_is_one_sequence_until_it_deletes_a_reply(tmp_path, monkeypatch, thinks):
    pytest.importorskip("minisweagent")
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("MSWEA_COST_TRACKING", "ignore_errors")
    turns = (
        call('{"command": "echo  5 \\u00e9"}', "bash"),
        "I think.",
        call('{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 6"}', "bash"),
    )

    def run(url):
        from minisweagent.agents.default import DefaultAgent
        from minisweagent.environments.local import LocalEnvironment
        from minisweagent.models.litellm_model import LitellmModel

        model = LitellmModel(
            model_name="openai/m", model_kwargs={"api_base": f"{url}/v1", "api_key": "x", "drop_params": True}
        )
        agent = DefaultAgent(
            model,
            LocalEnvironment(cwd=os.fspath(tmp_path)),
            system_template="You work.",
            instance_template="{{task}}",
            step_limit=6,
            cost_limit=0,
        )
        return agent.run(QUESTION)

    replies = iter(said(turns, thinks=thinks))
    async with served(lambda _: next(replies)) as agent:
        await asyncio.to_thread(run, agent.url)

        check_tokens(agent.session, agent.engine)
        assert [turn.sequence for turn in agent.captured.turns] == [0, 0, 1]
