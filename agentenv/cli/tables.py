"""Write a report as a few aligned lines of plain text."""

from __future__ import annotations

from collections.abc import Mapping

from agentenv.runs.report import ErrorCount, EvalReport, ToolStats

__all__ = ["print_report", "report_lines"]


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1000:.1f} ms" if value < 0.01 else f"{value * 1000:.0f} ms"
    return f"{value:.1f} s"


def _count(value: float) -> str:
    return (
        f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value / 1e3:.0f} k" if value >= 1e4 else f"{value:.0f}"
    )


def _ks(values: Mapping[int, float], sign: str) -> str:
    return "  ".join(f"pass{sign}{k} {value:.2f}" for k, value in values.items())


def report_lines(report: EvalReport) -> list[str]:
    """Return the lines of a report, without its head line."""
    lines: list[str] = []
    if report.reward is None:
        lines.append("reward   no episode has a score")
    else:
        rewards = "  ".join(f"{name} {value:.3f}" for name, value in report.rewards.items())
        interval = f"[{report.reward.low:.3f}, {report.reward.high:.3f}] 95 %"
        lines.append(f"reward   mean {report.reward.mean:.3f} {interval}   {rewards}".rstrip())
        passes = [_ks(report.pass_at, "@"), _ks({k: v for k, v in report.pass_all.items() if k > 1}, "^")]
        if report.majority is not None:
            passes.append(f"majority {report.majority:.2f}")
        lines.append("passes   " + "   ".join(text for text in passes if text))
    if report.num_groups:
        lines.append(
            f"groups   {report.num_groups_with_spread} of {report.num_groups} tasks have reward spread"
        )
    stops = " · ".join(f"{name} {count}" for name, count in report.stop_reasons.items())
    lines.append(f"stops    {stops}")
    lines += [
        ("tools    " if index == 0 else "         ") + _tool(tool) for index, tool in enumerate(report.tools)
    ]
    total = sum(report.time_s.values())
    shares = sorted(report.time_s.items(), key=lambda item: -item[1])
    times = "  ".join(f"{name} {value / total:.0%}" for name, value in shares if value / total >= 0.005)
    tokens = f"tokens {_count(report.prompt_tokens)} read, {_count(report.sampled_tokens)} sampled"
    cost = "" if report.cost_usd is None else f"   cost ${report.cost_usd:.4f}"
    lines.append(f"time     {times}   {tokens}{cost}" if total else f"         {tokens}{cost}")
    lines += [_failed(failure) for failure in report.errors[:3]]
    return lines


def _failed(failure: ErrorCount) -> str:
    where = f" ({failure.where})" if failure.where else ""
    return f"failed   {failure.count} × {failure.error}{where}"


def _tool(tool: ToolStats) -> str:
    text = f"{tool.name} {tool.num_calls} calls"
    if tool.num_calls > tool.errors.get("not_run", 0):
        text += f"  p50 {_seconds(tool.p50_s)}  p95 {_seconds(tool.p95_s)}"
    if tool.errors:
        kinds = ", ".join(f"{count} {kind}" for kind, count in tool.errors.items())
        text += f"  {kinds} → {tool.example[:70]!r}"
    return text


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
