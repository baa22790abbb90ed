"""An agent of pydantic-ai; `pip install pydantic-ai-slim[openai]`.

agentenv eval examples/agents/with_pydantic_ai.py -m hf:PATH
"""

from typing import Any

from pydantic_ai import Agent
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

import agentenv as ae

TASKS = [{"a": a, "b": b} for a in range(12, 22) for b in range(12, 22)]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class Multiply(ae.AgentEnv):
    """Multiply two numbers with a tool."""

    tasks = TASKS

    async def agent(self, url: str, task: Any) -> str:
        model = OpenAIChatModel("any", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="any"))
        agent = Agent(model, instructions="Use the tool.", tools=[multiply])
        try:
            return (await agent.run(f"What is {task['a']} * {task['b']}?")).output
        except AgentRunError:  # such as too many calls with wrong arguments
            return ""

    def reward(self, answer: str, a: int, b: int) -> float:
        return float(str(a * b) in answer)
