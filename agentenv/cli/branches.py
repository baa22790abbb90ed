"""`agentenv replay RUN --from-turn N -k K`: branch stored episodes and store the branches as a run."""

from __future__ import annotations

import asyncio
import json
import sys

from agentenv.cli.options import in_runs_dir
from agentenv.core.trajectory import TrajectoryGroup
from agentenv.runs.branch import Branching
from agentenv.runs.store.writer import RunWriter

__all__ = ["branch"]


def branch(branching: Branching, runs_dir: str, *, as_json: bool) -> int:
    """Play branches and print the results; return 1 if every branch failed, otherwise 0.

    Args:
        branching: what to play.
        runs_dir: directory of the new run.
        as_json: print one JSON object.
    """
    live = branching.load_model()
    with branching.new_run(runs_dir) as writer:
        groups = asyncio.run(branching.play(live, writer))
    _report(branching, writer, groups, runs_dir, as_json=as_json)
    return int(all(summary.stop_reason.failed for summary in writer.summaries))


def _report(
    branching: Branching, writer: RunWriter, groups: list[TrajectoryGroup], runs_dir: str, *, as_json: bool
) -> None:
    from agentenv.cli.tables import print_report
    from agentenv.runs.report import report_on

    source, turn = branching.source.id, branching.from_turn
    recorded = {
        f"{summary.group_id}/{summary.member}@turn-{turn}": summary.reward for summary in branching.episodes
    }
    rewards = {group.group_id: [member.reward for member in group] for group in groups}
    report = report_on(writer.summaries)
    if as_json:
        rows = [{"group_id": name, "recorded": recorded[name], "branches": rewards[name]} for name in rewards]
        facts = {"run": writer.id, "from": source, "groups": rows, **report.as_json()}
        sys.stdout.write(json.dumps(facts) + "\n")
        return
    print(f"branches of {source}   run {writer.id}")
    for name, values in rewards.items():
        print(f"  {name}   recorded {_number(recorded[name])}   branches {' '.join(map(_number, values))}")
    print_report(report, run=writer.id + in_runs_dir(runs_dir))


def _number(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"
