"""Evaluate a model behind an API that speaks OpenAI's protocol: scores, what it costs, and what went wrong.

OPENAI_API_KEY=... python examples/evaluate_api.py gpt-5-mini
python examples/evaluate_api.py NAME http://HOST:PORT/v1        # vLLM, SGLang, llama.cpp, Ollama, ...

The same on the command line:
agentenv eval agentenv/Calculator-v0 -m openai:NAME -n 20 -k 2 -o engine.base_url=http://HOST:PORT/v1
"""

import sys

import agentenv as ae

PRICES = {"price_in": 0.25, "price_out": 2.0}  # dollars for a million tokens, where the API reports no cost


def main(name: str, url: str = "", num_tasks: int = 20) -> None:
    result = ae.evaluate(
        "agentenv/Calculator-v0",
        f"openai:{name}",
        num_tasks=num_tasks,
        group_size=2,
        engine={**PRICES, **({"base_url": url} if url else {})},
        sampling={"temperature": 0.7},
        limits={"max_turns": 4, "max_tokens_per_turn": 500},
        runner={"concurrency": 8},  # requests at the same time
        runs_dir="runs",  # Ctrl-C keeps what is finished: agentenv eval --resume last
    )

    print(result)
    report = result.report
    if report.cost_usd is not None:
        print(f"an episode costs {100 * report.cost_usd / report.num_episodes:.4f} cents")
    failed = [episode for episode in result.summaries if (episode.reward or 0) < 1]
    for episode in failed[:3]:
        print(f"not solved: {episode.question[:60]!r} was answered {episode.answer[:60]!r}")


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
