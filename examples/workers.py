"""Play the episodes of a run in several processes, or on a Ray cluster; the results are the same.

python examples/workers.py                  # two processes
python examples/workers.py 8                # eight
python examples/workers.py 8 auto           # eight actors of the Ray cluster that this machine belongs to
agentenv eval examples/workers.py -m random --workers 8        # the same from the command line
"""

import sys

import agentenv as ae


class Primes(ae.ToolEnv):
    """An environment that computes: one process would play it on one core."""

    def start(self, limit: int) -> str:
        self.count = sum(all(n % d for d in range(2, n)) for n in range(2, limit))
        return f"How many primes are below {limit}?"

    @ae.tool
    def is_prime(self, n: int) -> bool:
        """Say whether a number is prime."""
        return n > 1 and all(n % d for d in range(2, n))

    def reward(self, answer: str) -> float:
        return float(str(self.count) in answer)


ae.register(
    "examples/Primes-v0", Primes, tasks=[{"limit": limit} for limit in range(100, 400, 25)], max_turns=3
)


def main(workers: int = 2, ray: str = "") -> None:
    spread = {"workers": workers, **({"ray": ray} if ray else {})}
    scores = {}
    for name, settings in (("one process", {}), (f"{workers} workers", spread)):
        result = ae.evaluate("examples/Primes-v0", "random", group_size=2, runs_dir="runs", **settings)
        scores[name] = [(episode.task_id, episode.member, episode.reward) for episode in result.summaries]
        print(f"{name}: {result.report.num_episodes} episodes, mean reward {result.report.reward.mean:.2f}")
    last = result.run.workers()
    print(f"played by {sorted(line['worker'] for line in last)}")
    print(f"the same episodes: {len({tuple(sorted(rows)) for rows in scores.values()}) == 1}")


if __name__ == "__main__":  # each worker imports this file, and must not start workers of its own
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
