"""A stronger model answers when the policy is unsure; its tokens are recorded but never trained.

python examples/router.py
"""

import asyncio

import agentenv as ae
from agentenv.engine import ScriptedEngine, ScriptedRequest, ScriptedTurn
from agentenv.render import byte_tokenizer
from agentenv_extras import LessSureThan, RouterEngine


class Sum(ae.ToolEnv):
    """Add two numbers without a tool."""

    def start(self, x: int, y: int) -> str:
        self.want = x + y
        return f"What is {x} + {y}?"

    def reward(self, answer: str) -> float:
        return float(str(self.want) in answer)


async def main() -> None:
    tokenizer = byte_tokenizer()

    def guess(request: ScriptedRequest) -> ScriptedTurn:
        """Play a policy that is sure of small numbers and guesses large ones."""
        sure = "2 + 3" in request.prompt_text
        text = "5" if sure else "1000"
        return ScriptedTurn(text=text, logprobs=[-0.1 if sure else -2.5] * (len(text) + 1))

    policy = ScriptedEngine(guess, tokenizer=tokenizer, name="small")
    helper = ScriptedEngine(["4321"], tokenizer=tokenizer, name="large")
    router = RouterEngine(policy, helper, unsure=LessSureThan(mean_logprob=-1.0))
    runner = ae.Runner(router, ae.Renderer(tokenizer))

    for x, y in ((2, 3), (4000, 321)):
        episode = await runner.run_episode(Sum(), {"x": x, "y": y})
        (sequence,) = episode.sequences
        print(
            f"{x} + {y}: {episode.messages[-1]['content']}, reward {episode.reward}, "
            f"{sum(sequence.loss_mask)} tokens to train on, last span by {sequence.spans[-1].source!r}"
        )
    print(f"the helper answered {router.routed} of 2 turns")


if __name__ == "__main__":
    asyncio.run(main())
