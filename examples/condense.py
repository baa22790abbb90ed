"""A conversation that outgrows the context: old tool outputs are condensed, and the model can recall them.

python examples/condense.py
"""

import asyncio

import agentenv as ae
from agentenv.engine import ScriptedEngine
from agentenv.render import byte_tokenizer
from agentenv.runner import DropToolOutputs


class Library(ae.ToolEnv):
    """Read pages until the word is found."""

    def start(self, word: str) -> str:
        self.word = word
        return "Which word stands on page 1?"

    @ae.tool
    def page(self, number: int) -> str:
        """Read a page."""
        words = self.word if number == 1 else "nothing"
        return f"Page {number}. " + "Lorem ipsum dolor sit amet. " * 20 + words

    def reward(self, answer: str) -> float:
        return float(self.word in answer)


async def main() -> None:
    tokenizer = byte_tokenizer()
    script = [
        '<tool_call>{"name": "page", "arguments": {"number": 1}}</tool_call>',
        '<tool_call>{"name": "page", "arguments": {"number": 2}}</tool_call>',
        '<tool_call>{"name": "page", "arguments": {"number": 3}}</tool_call>',
        '<tool_call>{"name": "recall_block", "arguments": {"block": 1}}</tool_call>',
        "The word is ocelot.",
    ]
    model = ScriptedEngine(script, tokenizer=tokenizer)
    runner = ae.Runner(
        model,
        ae.Renderer(tokenizer),
        ae.RunLimits(max_context_tokens=3000),
        condenser=DropToolOutputs(at=0.5),
    )

    episode = await runner.run_episode(Library(), {"word": "ocelot"})

    for number, sequence in enumerate(episode.sequences):
        print(f"sequence {number}: {len(sequence)} tokens, {sum(sequence.loss_mask)} to train on")
    print(f"condensed {episode.metrics['forks_tool_outputs']:.0f} times, reward {episode.reward}")


if __name__ == "__main__":
    asyncio.run(main())
