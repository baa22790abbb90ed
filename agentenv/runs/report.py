"""Compute the report of an evaluation from its episode summaries.

Episodes without an outcome (aborted, error) are counted and named, but are not part of any mean.
A task with fewer than k scored episodes is left out of pass@k; `num_tasks_at` has the number of tasks that
count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from agentenv.core.trajectory import StopReason
from agentenv.core.visible import one_line, visible
from agentenv.envs.advice import of_one_reward
from agentenv.runs.stats import Interval, clustered_mean, mean_of, pass_all_k, pass_at_k, quantile
from agentenv.runs.store.summary import EpisodeSummary, ToolUse

__all__ = [
    "ErrorCount",
    "EvalReport",
    "ToolStats",
    "majority_share",
    "report_lines",
    "report_on",
    "score_lines",
    "spending",
]

_TIMES = {
    "generate_s": "model",
    "tools_s": "tools",
    "env_s": "env",
    "user_s": "user",
    "render_s": "render",
    "queue_s": "queue",
}


@dataclass(frozen=True, slots=True)
class ToolStats:
    """Calls, times and errors of one tool over all episodes."""

    name: str
    num_calls: int
    p50_s: float
    p95_s: float
    errors: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of failed calls by the kind of error."""
    example: str = ""
    """The most frequent error text."""


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """The error of an episode, and the number of episodes that failed for the same reason."""

    error: str
    count: int
    where: str = ""
    """File, line and function in which the first of them was raised, as far as they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """Figures of an evaluation. `print` shows the table of `agentenv eval`; `as_json` has plain values."""

    env_ids: tuple[str, ...]
    num_episodes: int
    num_scored: int
    num_tasks: int
    reward: Interval | None
    """Mean reward of the scored episodes, clustered by task; None if no episode has a score."""
    success: Interval | None
    """Share of scored episodes with a reward of at least `success_at`."""
    success_at: float = 1.0
    """Least reward that counts as a success."""
    pass_at: Mapping[int, float] = field(default_factory=dict[int, float])
    """pass@k by k: the chance that at least one of k episodes of a task succeeds."""
    pass_all: Mapping[int, float] = field(default_factory=dict[int, float])
    """pass^k by k: the chance that all of k episodes of a task succeed."""
    num_tasks_at: Mapping[int, int] = field(default_factory=dict[int, int])
    """Number of tasks that count for each k."""
    majority: float | None = None
    """Share of tasks whose most frequent answer passes; each of several equally frequent answers counts
    in part.
    """
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    stop_reasons: Mapping[str, int] = field(default_factory=dict[str, int])
    tools: tuple[ToolStats, ...] = ()
    time_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds of all episodes together, by activity: model, tools, env, user, render, queue."""
    prompt_tokens: int = 0
    """Number of tokens that the model read but did not sample."""
    sampled_tokens: int = 0
    cost_usd: float | None = None
    spent: Mapping[str, float] = field(default_factory=dict[str, float])
    """Tokens that a server computed for this process, and their cost, where the engine counts them."""
    num_groups: int = 0
    """Number of tasks with at least two scored episodes."""
    num_groups_with_spread: int = 0
    """Number of these tasks whose rewards are not all equal."""
    truncated_share: float = 0.0
    errors: tuple[ErrorCount, ...] = ()
    terms: tuple[str, ...] = ()
    """What the means are means of: tasks, user, scorer and sampling (`agentenv.runs.terms`)."""
    warnings: tuple[str, ...] = ()
    """Problems that deserve attention, each with its remedy."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return asdict(self)

    def __repr__(self) -> str:
        scores = [f"{name} {value.mean:.3g}" for name, value in self._means() if value is not None]
        scored = f"{self.num_scored} of {self.num_episodes} episodes scored"
        return one_line(self, *scores, scored, " ".join(self.env_ids), *self.terms)

    def _means(self) -> tuple[tuple[str, Interval | None], ...]:
        return ("reward", self.reward), ("success", self.success)

    def __str__(self) -> str:
        warnings = [f"! {warning}" for warning in self.warnings]
        return visible("\n".join([*report_lines(self), *warnings, *score_lines(self)]))


def report_on(
    summaries: Iterable[EpisodeSummary], *, success_at: float = 1.0, terms: Sequence[str] = ()
) -> EvalReport:
    """Return the report of a run's episodes.

    Args:
        summaries: one summary for each episode.
        success_at: least reward that counts as a success.
        terms: what the means are means of.
    """
    # A sum of floats depends on the order of its terms, and episodes finish in any order.
    episodes = sorted(summaries, key=lambda episode: episode.key)
    scored = [episode for episode in episodes if episode.scored]
    tasks: dict[str, list[EpisodeSummary]] = {}
    for episode in scored:
        tasks.setdefault(f"{episode.env_id}\n{episode.task_id}", []).append(episode)
    values = {task: [member.reward or 0.0 for member in members] for task, members in tasks.items()}
    passed = {task: [float(reward >= success_at) for reward in rewards] for task, rewards in values.items()}
    largest = max(map(len, passed.values()), default=0)
    ks = sorted({k for k in (1, 2, 4, 8, 16, 32, 64, 128, largest) if 1 <= k <= largest})
    whole = {k: [verdicts for verdicts in passed.values() if len(verdicts) >= k] for k in ks}
    groups = [rewards for rewards in values.values() if len(rewards) > 1]
    tools = _tool_table(use for episode in episodes for use in episode.tools)
    failures = Counter(episode.failure for episode in episodes if episode.error)
    examples = {episode.failure: episode.error for episode in reversed(episodes)}
    costs = [cost for episode in episodes if (cost := _number(episode.metrics.get("cost_usd"))) is not None]
    return EvalReport(
        env_ids=tuple(dict.fromkeys(episode.env_id for episode in episodes)),
        num_episodes=len(episodes),
        num_scored=len(scored),
        num_tasks=len({(episode.env_id, episode.task_id) for episode in episodes}),
        reward=clustered_mean(values) if scored else None,
        success=clustered_mean(passed) if scored else None,
        success_at=success_at,
        pass_at={
            k: mean_of([pass_at_k(len(verdicts), int(sum(verdicts)), k) for verdicts in counted])
            for k, counted in whole.items()
        },
        pass_all={
            k: mean_of([pass_all_k(len(verdicts), int(sum(verdicts)), k) for verdicts in counted])
            for k, counted in whole.items()
        },
        num_tasks_at={k: len(counted) for k, counted in whole.items()},
        majority=_majority(tasks.values(), success_at) if largest > 1 else None,
        rewards=_named_rewards(scored),
        stop_reasons=dict(Counter(episode.stop_reason.value for episode in episodes).most_common()),
        tools=tools,
        time_s=_times(episodes),
        prompt_tokens=sum(map(_tokens_read, episodes)),
        sampled_tokens=sum(episode.sampled_tokens for episode in episodes),
        cost_usd=sum(costs) if costs else None,
        num_groups=len(groups),
        num_groups_with_spread=sum(len(set(rewards)) > 1 for rewards in groups),
        truncated_share=mean_of([float(episode.stop_reason.truncated) for episode in episodes]),
        errors=tuple(
            ErrorCount(examples[failure], count, failure[0]) for failure, count in failures.most_common()
        ),
        terms=tuple(terms),
        warnings=tuple(_warnings(episodes, scored, groups, tools, success_at)),
    )


def _tokens_read(episode: EpisodeSummary) -> int:
    """Return the tokens that the model read: what a chat API counted, or what was not trained."""
    counted = _number(episode.metrics.get("prompt_tokens"))
    return max(0, episode.total_tokens - episode.trained_tokens) if counted is None else int(counted)


def _number(said: object) -> float | None:
    """Return a metric of a run that others may have written; None if no sum can be made with it."""
    return said if isinstance(said, (int, float)) and abs(said) < 2.0**53 else None


def majority_share(answers: Sequence[str], passed: Sequence[bool]) -> float:
    """Return the share of passes of the most frequent answer, averaged over equally frequent answers."""
    counts = Counter(answers)
    most = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == most]
    verdicts = zip(answers, passed, strict=True)
    passes = Counter(answer for answer, verdict in verdicts if verdict)
    return mean_of([passes[winner] / most for winner in winners])


def _majority(tasks: Iterable[list[EpisodeSummary]], success_at: float) -> float:
    shares = [
        majority_share(
            [episode.answer for episode in episodes],
            [(episode.reward or 0.0) >= success_at for episode in episodes],
        )
        for episodes in tasks
    ]
    return mean_of(shares)


def _named_rewards(scored: Sequence[EpisodeSummary]) -> dict[str, float]:
    parts: dict[str, list[float]] = {}
    for episode in scored:
        for name, value in episode.rewards.items():
            if value is not None:
                parts.setdefault(name, []).append(value)
    return {name: mean_of(values) for name, values in parts.items()}


def _tool_table(uses: Iterable[ToolUse]) -> tuple[ToolStats, ...]:
    by_name: dict[str, list[ToolUse]] = {}
    for use in uses:
        by_name.setdefault(use.name, []).append(use)
    table: list[ToolStats] = []
    for name, named_uses in by_name.items():
        ran = [use.duration_s for use in named_uses if use.error_kind != "not_run"]
        failed = [use for use in named_uses if use.error_kind]
        texts = Counter(use.error for use in failed).most_common(1)
        table.append(
            ToolStats(
                name,
                len(named_uses),
                quantile(ran, 0.5) if ran else 0.0,
                quantile(ran, 0.95) if ran else 0.0,
                dict(Counter(use.error_kind for use in failed).most_common()),
                texts[0][0] if texts else "",
            )
        )
    return tuple(sorted(table, key=lambda tool: -tool.num_calls))


def _times(episodes: Sequence[EpisodeSummary]) -> dict[str, float]:
    spent = {
        label: sum(episode.timings.get(name, 0.0) for episode in episodes) for name, label in _TIMES.items()
    }
    return {label: seconds for label, seconds in spent.items() if seconds > 0}


def _warnings(
    episodes: Sequence[EpisodeSummary],
    scored: Sequence[EpisodeSummary],
    groups: Sequence[Sequence[float]],
    tools: Sequence[ToolStats],
    success_at: float,
) -> Iterable[str]:
    total = len(episodes)
    stops = Counter(episode.stop_reason for episode in episodes)
    if len(scored) < total:
        none = sum(not episode.scored and not episode.error for episode in episodes)
        why = f" ({none} got None as a reward; does reward() return a number?)" if none else ""
        lacking = f"{total - len(scored)} of {total} episodes have no score and are not part of any mean"
        yield f"{lacking}{why}: look at them with `agentenv view RUN`"
    trimmed = sum(episode.num_trimmed > 0 for episode in episodes)
    if trimmed:
        yield (
            f"in {trimmed} episodes tool output was shortened:"
            " raise max_tool_output_tokens, or let the tool return its output in pages"
        )
    for reason in StopReason:
        if reason.remedy and stops[reason] > max(1, total // 10):
            yield f"{stops[reason]} of {total} episodes ended by {reason.value}: {reason.remedy}"
    if filtered := stops[StopReason.CONTENT_FILTER]:
        yield (
            f"a filter of the API ended {filtered} of {total} episodes; they are scored like any other, and"
            " are part of the mean"
        )
    final = [episode for episode in scored if episode.stop_reason is StopReason.FINAL_ANSWER]
    silent = sum(not (episode.said or episode.answer) for episode in final)
    if silent > max(1, total // 10):
        yield (
            f"{silent} of {len(final)} final answers are empty, and are scored like any other: the model said"
            " nothing, or its server left it out; look at what it sends with `agentenv doctor -m MODEL`"
        )
    malformed = sum(episode.num_parse_errors > 0 for episode in episodes)
    if malformed > max(1, total // 10):
        yield f"{malformed} of {total} episodes had malformed tool calls: see `agentenv doctor`"
    broken = sum(tool.errors.get("exception", 0) + tool.errors.get("timeout", 0) for tool in tools)
    if broken:
        worst = max(tools, key=lambda tool: tool.errors.get("exception", 0) + tool.errors.get("timeout", 0))
        yield f"{broken} tool calls raised or timed out, most in {worst.name}: {worst.example}"
    # Where everything is solved, as an oracle does, there is nothing left to learn.
    solved = all(reward >= success_at for rewards in groups for reward in rewards)
    rewards = {episode.reward for episode in scored if episode.reward is not None}
    if advice := of_one_reward(rewards, len(scored), {success_at, 1.0}):
        yield advice
    elif groups and not solved and not any(len(set(rewards)) > 1 for rewards in groups):
        yield "all episodes of each task have the same reward: GRPO would get no gradient from them"


_SHOWN_TOOLS = 10


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


def score_lines(report: EvalReport) -> list[str]:
    """Return the terms of the mean reward, and the mean reward, which is the last line of a report."""
    if report.reward is None:
        return ["reward   no episode has a score"]
    rewards = "  ".join(f"{name} {value:.3f}" for name, value in report.rewards.items())
    low, high = report.reward.low, report.reward.high
    interval = f"[{low:.3f}, {high:.3f}] 95 %" if isfinite(low) else "of one task"
    left_out = report.num_episodes - report.num_scored
    of = f" of {report.num_scored} of {report.num_episodes} episodes" if left_out else ""
    terms = [f"terms    {' · '.join(report.terms)}"] if report.terms else []
    return [*terms, f"reward   mean {report.reward.mean:.3f} {interval}{of}   {rewards}".rstrip()]


def report_lines(report: EvalReport) -> list[str]:
    """Return the lines of a report, without its head line and its score."""
    lines: list[str] = []
    if report.reward is not None:
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
        ("tools    " if index == 0 else "         ") + _tool(tool)
        for index, tool in enumerate(report.tools[:_SHOWN_TOOLS])
    ]
    if (more := len(report.tools) - _SHOWN_TOOLS) > 0:
        lines.append(f"         and {more} more; --json has them all")
    total = sum(report.time_s.values())
    shares = sorted(report.time_s.items(), key=lambda item: -item[1])
    times = "  ".join(f"{name} {value / total:.0%}" for name, value in shares if value / total >= 0.005)
    tokens = f"tokens {_count(report.prompt_tokens)} read, {_count(report.sampled_tokens)} sampled"
    cost = "" if report.cost_usd is None else f"   cost ${report.cost_usd:.4f}"
    lines.append(f"time     {times}   {tokens}{cost}" if total else f"         {tokens}{cost}")
    lines += [f"server   {spent}"] if (spent := spending(report.spent)) else []
    lines += [_failed(failure) for failure in report.errors[:3]]
    return lines


def spending(metrics: Mapping[str, float]) -> str:
    """Return what a server computed, by metrics such as `spent/sampled_tokens`; empty if nothing."""
    names = ("prefilled", "cached", "sampled", "trained")
    counts = [f"{_count(n)} {name}" for name in names if (n := metrics.get(f"spent/{name}_tokens"))]
    cost = f"   cost {metrics['spent/cost']:.4g}" if counts and "spent/cost" in metrics else ""
    return f"tokens {', '.join(counts)}{cost}" if counts else ""


def _failed(failure: ErrorCount) -> str:
    where = f" ({failure.where})" if failure.where else ""
    return f"failed   {failure.count} × {failure.error}{where}"  # noqa: RUF001 - a cross is text for people


def _tool(tool: ToolStats) -> str:
    text = f"{tool.name} {tool.num_calls} calls"
    if tool.num_calls > tool.errors.get("not_run", 0):
        text += f"  p50 {_seconds(tool.p50_s)}  p95 {_seconds(tool.p95_s)}"
    if tool.errors:
        kinds = ", ".join(f"{count} {kind}" for kind, count in tool.errors.items())
        text += f"  {kinds} → {tool.example[:70]!r}"
    return text
