"""A model that writes broken JSON: the call is refused, or repaired if the environment allows it.

python examples/repair_json.py      (needs json-repair: pip install '.[repair]')
"""

import asyncio

import agentenv as ae
from agentenv.engine import ScriptedEngine
from agentenv.render import byte_tokenizer


class Strict(ae.ToolEnv):
    """Add two numbers."""

    def start(self, x: int, y: int) -> str:
        self.want = x + y
        return f"What is {x} + {y}?"

    @ae.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def reward(self, answer: str) -> float:
        return float(str(self.want) in answer)


class Lenient(Strict):
    """Repair broken JSON of a call instead of refusing it."""

    repair_json = True


async def main() -> None:
    tokenizer = byte_tokenizer()
    broken = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3,}</tool_call>'
    runner = ae.Runner(ScriptedEngine([broken, "5"], tokenizer=tokenizer), ae.Renderer(tokenizer))

    for env in (Strict(), Lenient()):
        episode = await runner.run_episode(env, {"x": 2, "y": 3})
        if episode.error:  # such as a package that is not installed
            raise SystemExit(episode.error.message)
        (result,) = episode.turns[0].tool_results
        print(f"{type(env).__name__}: {result.text!r:.100}, repaired: {result.repaired}")


if __name__ == "__main__":
    asyncio.run(main())
