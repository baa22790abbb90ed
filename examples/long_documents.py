"""A document that does not fit the context: its passages become keywords, and the model reads one in full.

python examples/long_documents.py
"""

import agentenv as ae
from agentenv.runs import evaluate
from agentenv.testing import tool_call

PASSAGES = [
    f"Passage {number}: the village of Brook{number} lies in a green valley near the river, and its market is"
    f" held on day {number} of each month. Its baker is called Mrs. Flour{number}. Travellers come from far"
    " away to taste the bread, and to rest for some days.\n\n"
    for number in range(1, 25)
]


class LongDocument(ae.ToolEnv):
    """Answer a question about a long document."""

    def start(self, village: int) -> str:
        return f"Read this.\n\n{''.join(PASSAGES)}Who is the baker of Brook{village}?"

    def reward(self, answer: str, village: int) -> float:
        return float(f"Flour{village}" in answer)


ae.register("examples/LongDocument-v0", LongDocument, tasks=[{"village": 7}])


def main() -> None:
    tiny = {"max_context_tokens": 4000}
    without = evaluate("examples/LongDocument-v0", "scripted:Mrs. Flour7", limits=tiny)
    print(f"without a condenser: {without.summaries[0].stop_reason.value}")

    condenser = {"name": "agentenv_extras:Keywords", "pattern": "^Passage", "ratio": 6.0}
    keywords = evaluate(
        "examples/LongDocument-v0", "scripted:Mrs. Flour7", limits=tiny, runner={"condenser": condenser}
    )
    (episode,) = keywords.groups[0].trajectories
    shown = str(episode.rewrites[0].messages[0]["content"])
    print(shown[: shown.index("[block 3")])
    print(f"with keywords: {len(shown)} characters instead of {len(str(episode.messages[0]['content']))}")

    reader = f"scripted:{tool_call('recall_block', block=7)}"
    limits = {**tiny, "max_turns": 2}
    reading = evaluate("examples/LongDocument-v0", reader, limits=limits, runner={"condenser": condenser})
    result = reading.groups[0].trajectories[0].turns[0].tool_results[0]
    print(f"block 7 again: {str(result.content)[:40]}... reward {keywords.report.reward.mean:.1f}")


if __name__ == "__main__":
    main()
