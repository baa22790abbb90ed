"""`agentenv rescore`: compute new rewards for stored episodes, without a model."""

from __future__ import annotations

import typer

from agentenv.cli.answer import print_json
from agentenv.cli.options import JsonOption, RunsDirOption, in_runs_dir
from agentenv.core.loops import run_blocking

__all__ = ["run"]


def run(
    name: str = typer.Argument(..., metavar="RUN", help="Run whose episodes are scored again."),
    rewards: list[str] = typer.Option(
        ..., "--reward", metavar="FILE.py:NAME", help="Reward function, or module:name; may be repeated."
    ),
    runs_dir: str = RunsDirOption,
    as_json: bool = JsonOption,
) -> None:
    """Score a run's episodes with other reward functions, and write the result as a new run."""
    from agentenv.cli.tables import print_report
    from agentenv.core.imports import import_object
    from agentenv.envs.rewards.group import rescore
    from agentenv.runs.report import report_on
    from agentenv.runs.store.reader import find_run
    from agentenv.runs.store.writer import RunWriter

    source = find_run(name, runs_dir)
    functions = [import_object(reward) for reward in rewards]
    with RunWriter.create(
        "rescored",
        kind="import",
        runs_dir=runs_dir,
        run_id="",
        env_ids=source.info.env_ids,
        model=source.info.model,
        seed=source.info.seed,
        terms=(*source.terms, f"scored again by {', '.join(rewards)}"),
        config={**source.info.config, "rescored_from": source.id, "rewards": rewards},
    ) as writer:
        for trajectory in source:
            writer.append(run_blocking(rescore(trajectory, functions)))
        writer.write_vocabulary(source.vocabulary())
        report = report_on(writer.summaries, terms=writer.info.terms)
    if as_json:
        print_json({"run": writer.id, "from": source.id, **report.as_json()})
    else:
        before = report_on(source.summaries).reward
        print(f"{source.id}, scored again by {', '.join(rewards)}   run {writer.id}")
        print(f"  before   mean {before.mean:.3f}" if before else "  before   no episode had a score")
        print_report(report, run=writer.id + in_runs_dir(runs_dir))
    if not report.num_scored:
        raise typer.Exit(1)
