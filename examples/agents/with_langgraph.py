"""An agent of LangGraph; `pip install langgraph langchain-openai`.

agentenv eval examples/agents/with_langgraph.py -m hf:PATH
"""

from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent

import agentenv as ae

TASKS = [{"a": a, "b": b} for a in range(12, 22) for b in range(12, 22)]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class Multiply(ae.AgentEnv):
    """Multiply two numbers with a tool."""

    tasks = TASKS

    async def agent(self, url: str, task: Any) -> str:
        model = ChatOpenAI(model="any", base_url=f"{url}/v1", api_key="any")
        agent = create_react_agent(model, [multiply], prompt="Use the tool.")
        question = {"role": "user", "content": f"What is {task['a']} * {task['b']}?"}
        try:
            state = await agent.ainvoke({"messages": [question]}, {"recursion_limit": 16})
        except GraphRecursionError:
            return ""
        return state["messages"][-1].text

    def reward(self, answer: str, a: int, b: int) -> float:
        return float(str(a * b) in answer)
