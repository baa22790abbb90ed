"""Read a run that went badly: what failed, where, what was cut, and one episode from its beginning.

python examples/failing_run.py                  # plays a run with three faults, and finds them
"""

import agentenv as ae
from agentenv.core import text_of
from agentenv.runs import find_run


class Invoices(ae.ToolEnv):
    """Find the total of an invoice. One file is missing, one is too long, and one total is wrong."""

    def start(self, number: int) -> str:
        if number == 3:
            raise FileNotFoundError("invoices/3.csv")  # a fault of the environment
        self.total = 100 + number
        return f"What is the total of invoice {number}?"

    @ae.tool
    def read(self, number: int) -> str:
        """Read an invoice."""
        lines = 400 if number == 2 else 2
        return "\n".join(["item,price"] * lines + [f"total,{100 + number}"])

    def reward(self, answer: str) -> float:
        return float(str(self.total) in answer)


def clerk(messages, task, rng):
    if messages[-1]["role"] != "tool":
        return ae.testing.tool_call_message("read", number=task["number"])
    last = text_of(messages[-1]).splitlines()[-1]
    return f"It is {last.split(',')[-1]}." if task["number"] != 4 else "It is 100."  # a fault of the policy


def main() -> None:
    tasks = [{"number": number} for number in range(8)]
    spec = ae.EnvSpec.of("examples/Invoices-v0", Invoices, tasks=tasks, max_turns=2)
    limits = {"max_context_tokens": 1000}
    print(ae.evaluate(spec, f"policy:{__file__}:clerk", limits=limits, runs_dir="runs"))

    run = find_run("last")  # a run of the command line is found in the same way
    places = [place for place, episode in enumerate(run.summaries) if not episode.reward]
    for place in places:  # each bad episode: the fault of the environment, of a limit, or of the policy
        episode = run.summaries[place]
        print(f"#{place} {episode.question!r}: {episode.stop_reason}, {episode.error or episode.answer!r}")
    wrong = next(place for place in places if run.summaries[place].stop_reason == "final_answer")
    for message in run.load(wrong).messages:  # one of them from its beginning
        print(f"  {message['role']}: {text_of(message) or message['tool_calls'][0]['function']}")
    print(f"agentenv view {run.id} --sort reward      agentenv replay {run.id}#{wrong}")


if __name__ == "__main__":
    main()
