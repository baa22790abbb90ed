"""Tool outputs that are too long: the model sees the beginning and the end, and the whole is kept on disk.

python examples/long_outputs.py
"""

import asyncio
from pathlib import Path

import agentenv as ae
from agentenv.engine import ScriptedEngine
from agentenv.render import byte_tokenizer


class Logs(ae.ToolEnv):
    """Find the error at the end of a long log."""

    def start(self) -> str:
        return "Why did the build fail?"

    @ae.tool
    def log(self) -> str:
        """Read the build's log."""
        return "\n".join(f"step {number} passed" for number in range(500)) + "\nerror: disk full"

    def reward(self, answer: str) -> float:
        return float("disk" in answer)


def main(folder: str = "runs/long-outputs") -> None:
    tokenizer = byte_tokenizer()
    script = ['<tool_call>{"name": "log", "arguments": {}}</tool_call>', "The disk is full."]
    runner = ae.Runner(
        ScriptedEngine(script, tokenizer=tokenizer),
        ae.Renderer(tokenizer),
        ae.RunLimits(max_tool_output_tokens=200),
        full_outputs=folder,
    )

    episode = asyncio.run(runner.run_episode(Logs(), {}))

    (result,) = episode.turns[0].tool_results
    whole = Path(folder, result.full_output or "").read_text()
    print(f"the model saw {len(result.text)} of {result.full_chars} characters:\n{result.text}\n")
    print(f"all {len(whole)} characters are in {folder}/{result.full_output}")
    print(f"reward {episode.reward}")


if __name__ == "__main__":
    main()
