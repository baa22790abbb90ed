"""An agent of smolagents, which is not asynchronous; `pip install smolagents[openai]`.

agentenv eval examples/agents/with_smolagents.py -m hf:PATH
"""

from typing import Any

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

import agentenv as ae

TASKS = [{"a": a, "b": b} for a in range(12, 22) for b in range(12, 22)]


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


class Multiply(ae.AgentEnv):
    """Multiply two numbers with a tool."""

    tasks = TASKS

    def agent(self, url: str, task: Any) -> str:
        model = OpenAIServerModel("any", api_base=f"{url}/v1", api_key="any")
        agent = ToolCallingAgent(tools=[multiply], model=model, max_steps=8, verbosity_level=0)
        return str(agent.run(f"What is {task['a']} * {task['b']}?"))

    def reward(self, answer: str, a: int, b: int) -> float:
        return float(str(a * b) in answer)
