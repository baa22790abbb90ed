"""A simulated user played by a model: its prompt is filled from the task, and it ends the conversation.

    python examples/model_user.py

Both models are scripted here; `ae.load_engine("http://localhost:8000/v1")` would use a served model.
"""

import asyncio

import agentenv as ae
from agentenv.engine import ScriptedEngine
from agentenv.render import byte_tokenizer

PROMPT = (
    "You are a customer of a shop. You want to return {item}, because {reason}. "
    "Say ###STOP### when the shop has agreed, or when you give up."
)


class Returns(ae.ToolEnv):
    """Find out what a customer wants, and take the right thing back."""

    ends_on_text = False  # the model's text goes to the customer

    def start(self, item: str, reason: str) -> str:
        self.item = item
        self.taken_back = ""
        return "A customer comes in."

    @ae.tool
    def take_back(self, item: str) -> str:
        """Take something back and give the money back."""
        self.taken_back = item
        return f"{item} taken back"

    def reward(self) -> float:
        return float(self.taken_back == self.item)


async def main() -> None:
    tokenizer = byte_tokenizer()
    renderer = ae.Renderer(tokenizer)
    call = '<tool_call>{"name": "take_back", "arguments": {"item": "a kettle"}}</tool_call>'
    clerk = ScriptedEngine(["How can I help?", call, "Here is your money."], tokenizer=tokenizer)
    customer = ScriptedEngine(["This kettle leaks.", "Thank you. ###STOP###"], tokenizer=tokenizer)
    user = ae.ModelUser(customer, PROMPT, renderer=renderer, sampling=ae.Sampling(max_tokens=64))

    episode = await ae.Runner(clerk, renderer).run_episode(
        Returns(), {"item": "a kettle", "reason": "it leaks"}, user=user
    )

    for message in episode.messages:
        print(f"{message['role']:>9}: {message['content']}")
    print(f"reward {episode.reward}, ended by {episode.stop_reason}")


if __name__ == "__main__":
    asyncio.run(main())
