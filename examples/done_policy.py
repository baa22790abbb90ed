"""A task that is done before the model says so: stop the episode, or let the model answer once more.

python examples/done_policy.py
"""

import asyncio

import agentenv as ae
from agentenv.engine import ScriptedEngine
from agentenv.render import byte_tokenizer


class Door(ae.ToolEnv):
    """Open a door; the task is done as soon as it is open."""

    def start(self) -> str:
        self.open = False
        return "Open the door."

    @ae.tool
    def push(self) -> str:
        """Push the door."""
        self.open = True
        return "It is open."

    def is_done(self) -> bool:
        return self.open

    def reward(self) -> float:
        return float(self.open)


async def main() -> None:
    tokenizer = byte_tokenizer()
    script = ['<tool_call>{"name": "push", "arguments": {}}</tool_call>', "I have opened the door."]
    runner = ae.Runner(ScriptedEngine(script, tokenizer=tokenizer), ae.Renderer(tokenizer))

    for policy in ("stop", "explain"):
        episode = await runner.run_episode(Door(), {}, done_policy=policy)
        last = episode.messages[-1]
        print(f"{policy}: {len(episode.turns)} turns, ended by {episode.stop_reason}")
        print(f"  last message, of {last['role']}: {last['content']}")


if __name__ == "__main__":
    asyncio.run(main())
