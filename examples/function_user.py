"""A simulated user that is a function: it answers the model's questions and ends the conversation.

python examples/function_user.py
"""

import asyncio

import agentenv as ae
from agentenv.engine import ScriptedEngine
from agentenv.render import byte_tokenizer


class Bookings(ae.ToolEnv):
    """Book a table for a guest, whom the model must ask for all details."""

    ends_on_text = False  # the model's text goes to the guest, and the guest ends the conversation

    def start(self, guest: str, people: int, hour: int) -> str:
        self.wanted = (people, hour)
        self.booked: tuple[int, int] | None = None
        return f"{guest} is on the phone and wants a table."

    @ae.tool
    def book(self, people: int, hour: int) -> str:
        """Book a table."""
        self.booked = (people, hour)
        return "booked"

    def reward(self) -> float:
        return float(self.booked == self.wanted)


def guest(messages: list[ae.Message], task: dict[str, object]) -> ae.UserTurn | str:
    said = str(messages[-1]["content"])
    if "How many" in said:
        return f"We are {task['people']}."
    if "When" in said:
        return f"At {task['hour']}."
    return ae.UserTurn("Thank you, goodbye.", done=True)


async def main() -> None:
    tokenizer = byte_tokenizer()
    call = '<tool_call>{"name": "book", "arguments": {"people": 4, "hour": 19}}</tool_call>'
    model = ScriptedEngine(["How many are you?", "When?", call, "Your table is booked."], tokenizer=tokenizer)
    runner = ae.Runner(model, ae.Renderer(tokenizer))
    task = {"guest": "Ada", "people": 4, "hour": 19}

    episode = await runner.run_episode(Bookings(), task, user=ae.FunctionUser(guest))

    for message in episode.messages:
        print(f"{message['role']:>9}: {message['content']}")
    print(f"reward {episode.reward}, ended by {episode.stop_reason}")


if __name__ == "__main__":
    asyncio.run(main())
