"""What an evaluation found: one pure function from episode summaries to a report.

Episodes without an outcome (aborted, error) are counted and named, and kept out of every mean.
A task with fewer scored episodes than k is left out of pass@k; `num_tasks_at` says how many count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agentenv.core.trajectory import StopReason
from agentenv.runs.stats import Interval, clustered_mean, pass_all_k, pass_at_k, quantile
from agentenv.runs.store.summary import EpisodeSummary, ToolUse

__all__ = ["ErrorCount", "EvalReport", "ToolStats", "majority_share", "report_on"]

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
    """What one tool did over all episodes."""

    name: str
    num_calls: int
    p50_s: float
    p95_s: float
    errors: Mapping[str, int] = field(default_factory=dict[str, int])
    """Failed calls by kind."""
    example: str = ""
    """The most frequent error text."""


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Episodes that failed alike."""

    error: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """Figures of an evaluation; `as_json` gives them as plain values."""

    env_ids: tuple[str, ...]
    num_episodes: int
    num_scored: int
    num_tasks: int
    reward: Interval | None
    """Mean over scored episodes, clustered by task; None when nothing was scored."""
    success: Interval | None
    """Share of scored episodes with a reward of at least `success_at`."""
    success_at: float = 1.0
    pass_at: Mapping[int, float] = field(default_factory=dict[int, float])
    pass_all: Mapping[int, float] = field(default_factory=dict[int, float])
    num_tasks_at: Mapping[int, int] = field(default_factory=dict[int, int])
    """Tasks behind each k."""
    majority: float | None = None
    """Share of tasks whose most frequent answer passes; ties count in parts."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    stop_reasons: Mapping[str, int] = field(default_factory=dict[str, int])
    tools: tuple[ToolStats, ...] = ()
    time_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds summed over episodes, by what they were spent on."""
    prompt_tokens: int = 0
    """Tokens that the model read and did not write."""
    sampled_tokens: int = 0
    cost_usd: float | None = None
    num_groups: int = 0
    """Tasks with at least two scored episodes."""
    num_groups_with_spread: int = 0
    truncated_share: float = 0.0
    errors: tuple[ErrorCount, ...] = ()
    warnings: tuple[str, ...] = ()
    """What should be looked at, each with its remedy."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return asdict(self)


def report_on(summaries: Iterable[EpisodeSummary], *, success_at: float = 1.0) -> EvalReport:
    """Return the report of a run's episodes.

    Args:
        summaries: one for each episode.
        success_at: least reward that counts as a pass.
    """
    # Sums of floats must not depend on who finished first.
    episodes = sorted(summaries, key=lambda one: one.key)
    scored = [one for one in episodes if one.scored]
    tasks: dict[str, list[EpisodeSummary]] = {}
    for one in scored:
        tasks.setdefault(f"{one.env_id}\n{one.task_id}", []).append(one)
    values = {task: [one.reward or 0.0 for one in found] for task, found in tasks.items()}
    passed = {task: [float(value >= success_at) for value in found] for task, found in values.items()}
    largest = max(map(len, passed.values()), default=0)
    ks = sorted({k for k in (1, 2, 4, 8, 16, 32, 64, 128, largest) if 1 <= k <= largest})
    whole = {k: [found for found in passed.values() if len(found) >= k] for k in ks}
    groups = [found for found in values.values() if len(found) > 1]
    tools = _tool_table(use for one in episodes for use in one.tools)
    failures = Counter(one.error for one in episodes if one.error)
    costs = [one.metrics["cost_usd"] for one in episodes if "cost_usd" in one.metrics]
    return EvalReport(
        env_ids=tuple(dict.fromkeys(one.env_id for one in episodes)),
        num_episodes=len(episodes),
        num_scored=len(scored),
        num_tasks=len({(one.env_id, one.task_id) for one in episodes}),
        reward=clustered_mean(values) if scored else None,
        success=clustered_mean(passed) if scored else None,
        success_at=success_at,
        pass_at={
            k: _mean([pass_at_k(len(one), int(sum(one)), k) for one in found]) for k, found in whole.items()
        },
        pass_all={
            k: _mean([pass_all_k(len(one), int(sum(one)), k) for one in found]) for k, found in whole.items()
        },
        num_tasks_at={k: len(found) for k, found in whole.items()},
        majority=_majority(tasks.values(), success_at) if largest > 1 else None,
        rewards=_named_rewards(scored),
        stop_reasons=dict(Counter(one.stop_reason.value for one in episodes).most_common()),
        tools=tools,
        time_s=_times(episodes),
        prompt_tokens=sum(max(0, one.total_tokens - one.trained_tokens) for one in episodes),
        sampled_tokens=sum(one.sampled_tokens for one in episodes),
        cost_usd=sum(costs) if costs else None,
        num_groups=len(groups),
        num_groups_with_spread=sum(len(set(found)) > 1 for found in groups),
        truncated_share=_mean([float(one.stop_reason.truncated) for one in episodes]),
        errors=tuple(ErrorCount(text, count) for text, count in failures.most_common()),
        warnings=tuple(_warnings(episodes, scored, groups, tools)),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def majority_share(answers: Sequence[str], passed: Sequence[bool]) -> float:
    """Return how far the most frequent answer passes: its own share, averaged over tied answers."""
    counts = Counter(answers)
    most = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == most]
    verdicts = zip(answers, passed, strict=True)
    passes = Counter(answer for answer, verdict in verdicts if verdict)
    return _mean([passes[winner] / most for winner in winners])


def _majority(tasks: Iterable[list[EpisodeSummary]], success_at: float) -> float:
    shares = [
        majority_share([one.answer for one in found], [(one.reward or 0.0) >= success_at for one in found])
        for found in tasks
    ]
    return _mean(shares)


def _named_rewards(scored: Sequence[EpisodeSummary]) -> dict[str, float]:
    parts: dict[str, list[float]] = {}
    for one in scored:
        for name, value in one.rewards.items():
            if value is not None:
                parts.setdefault(name, []).append(value)
    return {name: _mean(values) for name, values in parts.items()}


def _tool_table(uses: Iterable[ToolUse]) -> tuple[ToolStats, ...]:
    by_name: dict[str, list[ToolUse]] = {}
    for use in uses:
        by_name.setdefault(use.name, []).append(use)
    table: list[ToolStats] = []
    for name, found in by_name.items():
        ran = [use.duration_s for use in found if use.error_kind != "not_run"]
        failed = [use for use in found if use.error_kind]
        texts = Counter(use.error for use in failed).most_common(1)
        table.append(
            ToolStats(
                name,
                len(found),
                quantile(ran, 0.5) if ran else 0.0,
                quantile(ran, 0.95) if ran else 0.0,
                dict(Counter(use.error_kind for use in failed).most_common()),
                texts[0][0] if texts else "",
            )
        )
    return tuple(sorted(table, key=lambda one: -one.num_calls))


def _times(episodes: Sequence[EpisodeSummary]) -> dict[str, float]:
    spent = {label: sum(one.timings.get(name, 0.0) for one in episodes) for name, label in _TIMES.items()}
    return {label: seconds for label, seconds in spent.items() if seconds > 0}


def _warnings(
    episodes: Sequence[EpisodeSummary],
    scored: Sequence[EpisodeSummary],
    groups: Sequence[Sequence[float]],
    tools: Sequence[ToolStats],
) -> Iterable[str]:
    total = len(episodes)
    stops = Counter(one.stop_reason for one in episodes)
    if len(scored) < total:
        yield (
            f"{total - len(scored)} of {total} episodes have no score and are in no mean:"
            " look at them with `agentenv view RUN`"
        )
    trimmed = sum(one.num_trimmed > 0 for one in episodes)
    if trimmed:
        yield f"{trimmed} episodes lost tool output: raise max_tool_output_tokens, or let the tool page"
    for reason, remedy in _REMEDIES.items():
        if stops[reason] > max(1, total // 10):
            yield f"{stops[reason]} of {total} episodes ended by {reason.value}: {remedy}"
    malformed = sum(one.num_parse_errors > 0 for one in episodes)
    if malformed > max(1, total // 10):
        yield f"{malformed} of {total} episodes had malformed tool calls: see `agentenv doctor`"
    broken = sum(tool.errors.get("exception", 0) + tool.errors.get("timeout", 0) for tool in tools)
    if broken:
        worst = max(tools, key=lambda tool: tool.errors.get("exception", 0) + tool.errors.get("timeout", 0))
        yield f"{broken} tool calls raised or timed out, most in {worst.name}: {worst.example}"
    if groups and not any(len(set(found)) > 1 for found in groups):
        yield "no task has reward spread: GRPO would get no gradient from these episodes"


_REMEDIES = {
    StopReason.MAX_TURNS: "raise max_turns, or shorten what the task needs",
    StopReason.GENERATION_LENGTH: "raise max_tokens_per_turn; cut turns run no tools",
    StopReason.CONTEXT_LENGTH: "raise max_context_tokens, or trim tool output",
    StopReason.TOOL_OUTPUT_OVERFLOW: "lower max_tool_output_tokens, or let the tool page",
    StopReason.MAX_TOOL_CALLS: "raise max_tool_calls",
    StopReason.MAX_PARSE_ERRORS: "the model does not keep to the tool-call format; see `agentenv doctor`",
    StopReason.DEADLINE: "raise the time limits, or lower the concurrency",
}
