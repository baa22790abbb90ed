"""Measure what an episode of a world costs, beside the world's own replay of the same ground truth.

    python benchmarks/worlds.py [--quick] [--json PATH] [--only WORLD ...] [--inspect PYTHON]

The oracle plays through our environment, which is what a run pays besides the model. For BFCL the other
column is the leaderboard's checker alone, which runs the ground truth twice and reads the data each time.
For AgentDojo it is the package's own harness, which reads its data from YAML in each episode.
MiniSWE's figure is that of this process: it has the start of a sandbox for each episode, which the episodes
of a run share, and lacks what runs in it.
For tau2:retail it is Inspect's own task of tau2 with scripted models, in the interpreter that --inspect
names; it takes seconds an episode, so measure it with --quick.
Worlds whose package is not installed are skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from agentenv.core import Message, Task
from agentenv.envs import EnvSpec, spec
from agentenv.testing import oracle_of, play


def bfcl(tasks: list[Task]) -> None:
    """Check the ground truth with the leaderboard's checker, as its own evaluation does."""
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker as checker

    category = tasks[0].id.rpartition("_")[0]
    found = find_spec("bfcl_eval")
    assert found is not None and found.submodule_search_locations is not None  # noqa: PT018
    folder = Path(found.submodule_search_locations[0]) / "data"
    entries, truths = (
        {row["id"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
        for path in (folder / f"BFCL_v4_{category}.json", folder / f"possible_answer/BFCL_v4_{category}.json")
    )
    for task in tasks:
        truth = truths[task.id]["ground_truth"]
        said = [[[call] for call in turn] for turn in truth]
        name = f"own{time.monotonic_ns()}"  # the checker keeps its objects by this name
        assert checker.multi_turn_checker(said, truth, entries[task.id], category, name)["valid"]


def agentdojo(tasks: list[Task]) -> None:
    """Play the ground truth in AgentDojo's own harness."""
    # Both were loaded when our episodes were played, without the clients of model providers.
    from agentdojo.agent_pipeline.ground_truth_pipeline import GroundTruthPipeline
    from agentdojo.task_suite.load_suites import get_suite

    for task in tasks:
        suite = get_suite("v1.2.2", str(task.data["suite"]))
        user_task = suite.user_tasks[str(task.data["user_task"])]
        assert suite.run_task_with_pipeline(GroundTruthPipeline(user_task), user_task, None, {}) == (
            True,
            True,
        )


def tau2(tasks: list[Task], python: str) -> float:
    """Play the ground truth in tau2's own harness, in an interpreter that has Inspect."""
    gold = oracle_of(spec("tau2:retail"))
    assert gold is not None
    steps: dict[str, list[Message]] = {}
    for task in tasks:
        said = steps.setdefault(str(task.data["id"]), [])
        while not said or said[-1].get("tool_calls"):
            said.append(gold([{"role": "assistant", "content": ""}] * len(said), task.data, random.Random(0)))
    answer = subprocess.run(
        [python, str(Path(__file__).with_name("worlds_tau2.py"))],
        input=json.dumps({"domain": "retail", "steps": steps}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures = json.loads(answer.stdout.splitlines()[-1])
    print(f"{'':<30} Inspect's scorer accepts {figures['right']} of {len(tasks)}", file=sys.stderr)
    return float(figures["milliseconds"])


WORLDS: dict[str, tuple[str, str, Callable[[list[Task]], None] | None]] = {
    "bfcl:multi_turn_base": ("bfcl_eval", "test", bfcl),
    "bfcl:multi_turn_long_context": ("bfcl_eval", "test", bfcl),
    "bfcl:parallel": ("bfcl_eval", "test", None),
    "tau2:retail": ("inspect_evals", "test", None),
    "tau2:telecom": ("inspect_evals", "test", None),
    "tau2:banking_knowledge": ("inspect_evals", "test", None),
    "agentdojo:banking": ("agentdojo", "test", agentdojo),
    "agentdojo:workspace": ("agentdojo", "test", agentdojo),
    "agentenv_envs.search:Search": ("agentenv", "test", None),
    "agentenv_envs.mini_swe:MiniSWE": ("toolz", "test", None),
}


async def ours(entry: EnvSpec, tasks: list[Task]) -> None:
    for task in tasks:
        played = await play(entry, oracle_of(entry), task)
        assert played.reward == 1.0, task.id


def milliseconds(run: Callable[[], object], tasks: list[Task]) -> float:
    run()  # reads the data once
    began = time.process_time()
    run()
    return 1e3 * (time.process_time() - began) / len(tasks)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inspect", metavar="PYTHON", help="interpreter with inspect_ai and inspect_evals")
    parser.add_argument("--only", nargs="*", choices=list(WORLDS), default=list(WORLDS))
    options = parser.parse_args()
    figures: dict[str, dict[str, float | None]] = {}
    print(f"{'world':<30} {'agentenv':>9} {'its own':>9}   CPU ms an episode")
    for name in options.only:
        package, split, own = WORLDS[name]
        if find_spec(package) is None:
            print(f"{name:<30} skipped: {package} is not installed")
            continue
        entry = spec(name)
        tasks = entry.task_set(split).take(5 if options.quick else 40)
        mine = milliseconds(lambda: asyncio.run(ours(entry, tasks)), tasks)  # noqa: B023 - called at once
        theirs = None if own is None else milliseconds(lambda: own(tasks), tasks)  # noqa: B023
        if name == "tau2:retail" and options.inspect is not None:
            theirs = tau2(tasks, options.inspect)
        figures[name] = {"agentenv": mine, "own": theirs}
        print(f"{name:<30} {mine:>9.2f} {'' if theirs is None else f'{theirs:.2f}':>9}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
