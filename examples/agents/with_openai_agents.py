"""An agent of openai-agents; `pip install openai-agents`.

agentenv eval examples/agents/with_openai_agents.py -m hf:PATH
"""

from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException
from openai import AsyncOpenAI

import agentenv as ae

set_tracing_disabled(True)  # else it sends every run to OpenAI

TASKS = [{"a": a, "b": b} for a in range(12, 22) for b in range(12, 22)]


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class Multiply(ae.AgentEnv):
    """Multiply two numbers with a tool."""

    tasks = TASKS

    async def agent(self, url: str, task: Any) -> str:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as sdk:
            model = OpenAIChatCompletionsModel("any", sdk)
            agent = Agent(name="Multiplier", instructions="Use the tool.", tools=[multiply], model=model)
            try:
                result = await Runner.run(agent, f"What is {task['a']} * {task['b']}?", max_turns=8)
            except AgentsException:  # such as a call of a tool that does not exist
                return ""
        return str(result.final_output)

    def reward(self, answer: str, a: int, b: int) -> float:
        return float(str(a * b) in answer)
