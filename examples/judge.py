"""A model that judges answers: half of the reward is for the facts, half for what the judge says.

python examples/judge.py                        # with a scripted judge
python examples/judge.py openai:gpt-5           # or any other model
"""

import sys

import agentenv as ae

SCRIPTED = "scripted:It is short and clear.\nSCORE: 9"
RUBRIC = """A customer asked: {question}
The shop answered: {answer}
Rate from 0 to 10 how clear and how friendly the answer is."""


class Shop(ae.ToolEnv):
    """Answer a customer's question."""

    def start(self, question: str, hour: int) -> str:
        return question

    def reward(self, answer: str, hour: int) -> float:
        return 0.5 * (str(hour) in answer)


def main(judge_model: str = SCRIPTED) -> None:
    tasks = [{"question": "When do you open?", "hour": 9}, {"question": "When do you close?", "hour": 18}]
    judge = ae.Judge(judge_model, RUBRIC, name="clear")
    spec = ae.EnvSpec.of("examples/Shop-v0", Shop, tasks=tasks, rewards=[(judge, 0.5)])

    result = ae.evaluate(spec, "scripted:We open at 9, and we are glad to see you.", num_tasks=None)

    for group in result.groups:
        (episode,) = group
        print(f"{episode.task['question']} {episode.messages[-1]['content']}")
        print(f"  parts {dict(episode.rewards)}, reward {episode.reward:.2f}")
    # An answer without a readable score is asked for again; one that has none in the end is no score of 0.
    print(f"the judge gave {judge.stats.verdicts} scores, {judge.stats.failures} times none")


if __name__ == "__main__":
    main(*sys.argv[1:])
