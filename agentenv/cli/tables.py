"""Print a report, its warnings, what to do next, and last the score."""

from __future__ import annotations

from collections.abc import Sequence

from agentenv.runs.report import EvalReport, report_lines, score_lines

__all__ = ["print_report"]


def print_report(report: EvalReport, *, run: str = "", notes: Sequence[str] = ()) -> None:
    """Print a report, its warnings, the command that opens the viewer, and the score.

    Args:
        report: the report.
        run: the run as a command has to name it; no command is printed if it is empty.
        notes: what else to say, such as why the run ended early.
    """
    for line in report_lines(report):
        print(" ", line)
    for warning in report.warnings:
        print(f" ! {warning.replace('RUN', run)}")
    if run:
        print(f" view: agentenv view {run}     worst: agentenv view {run} --sort reward")
    for note in notes:
        print(f" {note}")
    for line in score_lines(report):
        print(" ", line)
