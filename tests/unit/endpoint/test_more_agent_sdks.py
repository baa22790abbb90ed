"""Agents of SDKs that cannot stand beside the newest ones of OpenAI and Anthropic: each is one sequence too.

`.ci/install-agents` installs them into an environment of their own for `make test-agents`; elsewhere they are
skipped.
"""

from __future__ import annotations

import asyncio
import gc

import pytest

from helpers.sdk_agents import QUESTION, THINKS, TURNS, check_linear, lookup, require

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the SDKs, which warn as they like
]


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return str(a + b)


async def agno(url, stream, api="chat"):
    from agno.agent import Agent

    if api == "anthropic":
        from agno.models.anthropic import Claude

        model = Claude(id="m", api_key="x", client_params={"base_url": url})
    elif api == "responses":
        from agno.models.openai import OpenAIResponses

        model = OpenAIResponses(id="m", api_key="x", base_url=f"{url}/v1")
    else:
        from agno.models.openai import OpenAIChat

        model = OpenAIChat(id="m", api_key="x", base_url=f"{url}/v1")
    agent = Agent(model=model, tools=[add, lookup], instructions="You add.", telemetry=False)
    if not stream:
        return (await agent.arun(QUESTION)).content
    last = ""
    async for event in agent.arun(QUESTION, stream=True, stream_events=True):
        if type(event).__name__ == "RunCompletedEvent":
            last = event.content
    return last


async def autogen(url, stream):
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = dict.fromkeys(("vision", "json_output", "structured_output"), False)
    info |= {"function_calling": True, "family": "unknown"}
    client = OpenAIChatCompletionClient(model="m", api_key="x", base_url=f"{url}/v1", model_info=info)
    agent = AssistantAgent(
        "a",
        client,
        tools=[add, lookup],
        system_message="You add.",
        max_tool_iterations=5,
        model_client_stream=stream,
    )
    return (await agent.run(task=QUESTION)).messages[-1].content


async def haystack(url, stream):
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    model = OpenAIChatGenerator(
        model="m",
        api_key=Secret.from_token("x"),
        api_base_url=f"{url}/v1",
        streaming_callback=(lambda chunk: None) if stream else None,
    )
    tools = [create_tool_from_function(add), create_tool_from_function(lookup)]
    agent = Agent(chat_generator=model, tools=tools, system_prompt="You add.")
    done = await asyncio.to_thread(lambda: agent.run(messages=[ChatMessage.from_user(QUESTION)]))
    return done["messages"][-1].text


async def semantic_kernel(url, stream):
    from openai import AsyncOpenAI
    from semantic_kernel.agents import ChatCompletionAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
    from semantic_kernel.functions import KernelPlugin, kernel_function

    sdk = AsyncOpenAI(base_url=f"{url}/v1", api_key="x")
    functions = [kernel_function(add, name="add"), kernel_function(lookup, name="lookup")]
    agent = ChatCompletionAgent(
        service=OpenAIChatCompletion(ai_model_id="m", async_client=sdk),
        name="a",
        instructions="You add.",
        plugins=[KernelPlugin(name="p", functions=functions)],
    )
    if not stream:
        return str((await agent.get_response(QUESTION)).content)
    said = [str(part.content) async for part in agent.invoke_stream(QUESTION)]
    return "".join(said)


async def strands(url, stream, api="chat"):
    from strands import Agent, tool

    if api == "anthropic":
        from strands.models.anthropic import AnthropicModel

        model = AnthropicModel(client_args={"api_key": "x", "base_url": url}, model_id="m", max_tokens=1000)
    else:
        from strands.models.openai import OpenAIModel

        model = OpenAIModel(client_args={"api_key": "x", "base_url": f"{url}/v1"}, model_id="m")
    agent = Agent(
        model=model, tools=[tool(add), tool(lookup)], system_prompt="You add.", callback_handler=None
    )
    return str(await agent.invoke_async(QUESTION))


async def llama_index(url, stream):
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model="m",
        api_base=f"{url}/v1",
        api_key="x",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=30000,
    )
    agent = FunctionAgent(tools=[add, lookup], llm=model, system_prompt="You add.", streaming=stream)
    return str(await agent.run(QUESTION))


async def agent_framework(url, stream):
    from agent_framework import Agent, tool
    from agent_framework.openai import OpenAIChatCompletionClient

    client = OpenAIChatCompletionClient(model="m", api_key="x", base_url=f"{url}/v1")
    agent = Agent(client, "You add.", tools=[tool(add), tool(lookup)])
    if not stream:
        return (await agent.run(QUESTION)).text
    said = [part.text async for part in agent.run(QUESTION, stream=True)]
    return "".join(said)


async def crewai(url, stream):
    from crewai import LLM, Agent
    from crewai.tools import tool

    model = LLM(model="openai/m", base_url=f"{url}/v1", api_key="x", stream=stream)
    tools = [tool("add")(add), tool("lookup")(lookup)]
    agent = Agent(role="adder", goal="add", backstory="You add.", llm=model, tools=tools)
    return (await asyncio.to_thread(agent.kickoff, QUESTION)).raw


async def google_adk(url, stream):
    from google.adk.agents import Agent
    from google.adk.agents.run_config import RunConfig, StreamingMode
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    model = LiteLlm(model="openai/m", api_base=f"{url}/v1", api_key="x")
    agent = Agent(name="a", model=model, instruction="You add.", tools=[add, lookup])
    runner = InMemoryRunner(agent=agent, app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="u")
    said = types.Content(role="user", parts=[types.Part(text=QUESTION)])
    mode = StreamingMode.SSE if stream else StreamingMode.NONE
    last = ""
    async for event in runner.run_async(
        user_id="u", session_id=session.id, new_message=said, run_config=RunConfig(streaming_mode=mode)
    ):
        if event.is_final_response() and event.content:
            last = "".join(part.text or "" for part in event.content.parts if not part.thought)
    return last


AGENTS = {
    "agent-framework chat": ("agent_framework", agent_framework, (False, True)),
    "crewai chat": ("crewai", crewai, (False, True)),
    "google-adk chat": ("google.adk", google_adk, (False, True)),
    "agno chat": ("agno", agno, (False, True)),
    "agno responses": ("agno", lambda url, stream: agno(url, stream, "responses"), (False, True)),
    "agno anthropic": ("agno", lambda url, stream: agno(url, stream, "anthropic"), (False, True)),
    "autogen chat": ("autogen_agentchat", autogen, (False, True)),
    "haystack chat": ("haystack", haystack, (False, True)),
    "semantic-kernel chat": ("semantic_kernel", semantic_kernel, (False, True)),
    "strands chat": ("strands", strands, (True,)),
    "strands anthropic": ("strands", lambda url, stream: strands(url, stream, "anthropic"), (True,)),
    "llama-index chat": ("llama_index.llms.openai_like", llama_index, (False, True)),
}


@pytest.fixture(autouse=True)
def no_look_ups(monkeypatch):
    """litellm would fetch a list of prices, which google-adk reads, and crewai would report its use."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    for name in ("CREWAI_DISABLE_TELEMETRY", "OTEL_SDK_DISABLED"):
        monkeypatch.setenv(name, "true")


@pytest.fixture(autouse=True)
async def clients_end_with_their_test():
    """Several SDKs leave their client open; what a client says when it is forgotten belongs to its test."""
    yield
    gc.collect()


CASES = [(name, stream) for name, (_, _, ways) in AGENTS.items() for stream in ways]


@THINKS
@pytest.mark.parametrize(("name", "stream"), CASES)
async def test_a_linear_conversation_is_one_sequence(name, stream, thinks):
    package, run, _ = AGENTS[name]
    require(package)
    turns = TURNS
    if name.startswith("semantic"):  # it names its functions after their plugin
        turns = [text.replace('"add"', '"p-add"').replace('"lookup"', '"p-lookup"') for text in TURNS]
    await check_linear(lambda url: run(url, stream), thinks=thinks, turns=turns)
