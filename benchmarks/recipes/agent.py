"""An agent with a loop of its own, on the SDK of OpenAI: it multiplies with a tool."""

import random
from typing import Any

from openai import AsyncOpenAI

import agentenv as ae


@ae.tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class Multiplier(ae.AgentEnv):
    """Multiply two numbers."""

    async def agent(self, url: str, task: Any) -> str:
        messages: list[Any] = [{"role": "user", "content": f"What is {task['a']} * {task['b']}?"}]
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as sdk:
            for _ in range(3):
                said = await sdk.chat.completions.create(
                    model="any", messages=messages, tools=[multiply.schema()]
                )
                message = said.choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    return message.content or ""
                for call in message.tool_calls:
                    result = await multiply.call(call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result.text})
        return ""

    def reward(self, answer: str, a: int, b: int) -> float:
        return float(answer.strip().rstrip(".").endswith(str(a * b)))

    @staticmethod
    def oracle(messages, task, rng):
        if results := [message["content"] for message in messages if message["role"] == "tool"]:
            return f"It is {results[-1]}."
        return ae.testing.tool_call_message("multiply", a=task["a"], b=task["b"])


rows = [{"a": a, "b": b} for a in range(101, 131) for b in range(101, 131)]
random.Random(0).shuffle(rows)
ae.register("recipes/Multiplier-v0", Multiplier, tasks={"train": rows[:-50], "test": rows[-50:]})
