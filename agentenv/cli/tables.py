"""Print a report, its warnings, and what to do next."""

from __future__ import annotations

from agentenv.runs.report import EvalReport, report_lines

__all__ = ["print_report"]


def print_report(report: EvalReport, *, run: str = "") -> None:
    """Print a report, its warnings, and the command that opens the viewer.

    Args:
        report: the report.
        run: the run as a command has to name it; no command is printed if it is empty.
    """
    for line in report_lines(report):
        print(" ", line)
    for warning in report.warnings:
        print(f" ! {warning.replace('RUN', run)}")
    if run:
        print(f" view: agentenv view {run}     worst: agentenv view {run} --sort reward")
