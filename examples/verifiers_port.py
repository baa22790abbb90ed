"""An environment of verifiers, played as it is and then ported; both give the same rewards.

python examples/verifiers_port.py       (pip install 'verifiers>=0.1.14,<0.4')
"""

import asyncio

import verifiers as vf
from datasets import Dataset

import agentenv as ae
from agentenv.testing import play, tool_call_message
from agentenv_worlds.verifiers.env import Verifiers

ROWS = [{"question": f"What is {n} + 20?", "answer": str(n + 20)} for n in range(30, 36)]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return int(a) + int(b)


def right(completion, answer, **kwargs) -> float:
    return float(answer in str(completion[-1]["content"]))


dataset, rubric = Dataset.from_list(ROWS), vf.Rubric(funcs=[right])
theirs = vf.ToolEnv(dataset=dataset, tools=[add], rubric=rubric, max_turns=4)


class Sums(ae.ToolEnv):
    """The same as one of ours: the rows are the tasks, and the rubric is the reward."""

    tools = (ae.tool(add),)

    def start(self, question: str, answer: str) -> str:
        self.want = answer
        return question

    def reward(self, answer: str) -> float:  # `answer` is what the model said last
        return float(self.want in answer)


def policy(messages, task, rng):
    if messages[-1]["role"] != "tool":
        return tool_call_message("add", a=int(task["answer"]) - 20, b=20)
    return "It is 7." if int(task["answer"]) % 2 else f"It is {messages[-1]['content']}."


async def main() -> None:
    ported = ae.EnvSpec.of("examples/Sums-v0", Sums, tasks=ROWS, max_turns=4)
    their_rows = list(theirs.get_dataset())  # of an installed one: ae.spec("verifiers:NAME")
    adapted = ae.EnvSpec.of("examples/TheirSums-v0", lambda: Verifiers(theirs), tasks=their_rows)
    for spec in (adapted, ported):
        rewards = [(await play(spec, policy, task)).reward for task in spec.task_set()]
        print(f"{spec.id}: {rewards}")


if __name__ == "__main__":
    asyncio.run(main())
