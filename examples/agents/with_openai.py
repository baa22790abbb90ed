"""An agent of OpenAI's own SDK, with a loop written by hand.

agentenv eval examples/agents/with_openai.py -m hf:PATH
"""

from typing import Any

import openai

import agentenv as ae

TASKS = [{"a": a, "b": b} for a in range(12, 22) for b in range(12, 22)]


@ae.tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class Multiply(ae.AgentEnv):
    """Multiply two numbers with a tool."""

    tasks = TASKS

    async def agent(self, url: str, task: Any) -> str | None:
        messages: list[Any] = [{"role": "user", "content": f"What is {task['a']} * {task['b']}?"}]
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as sdk:
            while True:
                said = await sdk.chat.completions.create(
                    model="any", messages=messages, tools=[multiply.schema()]
                )
                message = said.choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    return message.content
                for call in message.tool_calls:
                    result = await multiply.call(call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result.text})

    def reward(self, answer: str, a: int, b: int) -> float:
        return float(str(a * b) in answer)
