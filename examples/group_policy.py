"""Groups whose members fail: other episodes replace them, so that each group keeps its size.

python examples/group_policy.py
"""

import asyncio
from contextlib import aclosing

import agentenv as ae
from agentenv.engine import ScriptedEngine
from agentenv.render import byte_tokenizer


class Flaky(ae.ToolEnv):
    """Echo a word; every third start of the environment fails."""

    started = 0

    def start(self, word: str) -> str:
        Flaky.started += 1
        if Flaky.started % 3 == 0:
            raise RuntimeError("the backend has gone away")
        self.word = word
        return f"Say {word}."

    def reward(self, answer: str) -> float:
        return float(self.word in answer)


async def main() -> None:
    Flaky.started = 0
    tokenizer = byte_tokenizer()
    spec = ae.EnvSpec.of("examples/Flaky-v0", Flaky, tasks=[{"word": "yes"}])
    runner = ae.Runner(ScriptedEngine(["yes"], tokenizer=tokenizer), ae.Renderer(tokenizer))

    for policy in (ae.GroupPolicy(), ae.GroupPolicy(on_failed="refill", max_refills=2, min_usable=4)):
        groups = runner.run_groups(spec, spec.task_set(), group_size=4, policy=policy)
        async with aclosing(groups):
            async for group in groups:
                usable = [episode for episode in group.trajectories if episode.trainable]
                failed = [episode for episode in group.trajectories if episode.error is not None]
                print(f"{policy.on_failed}: {len(usable)} usable members, {len(failed)} failed")
                print(f"  the error: {failed[0].error.message}")


if __name__ == "__main__":
    asyncio.run(main())
