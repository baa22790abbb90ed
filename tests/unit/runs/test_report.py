"""Reports: every figure against a count by hand, whatever the order of the episodes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core import StopReason
from agentenv.runs import report_on
from agentenv.runs.report import majority_share, report_lines, score_lines
from agentenv.runs.store import EpisodeSummary, ToolUse


def episode(task: int, member: int = 0, reward: float | None = 1.0, **values: object) -> EpisodeSummary:
    defaults = {
        "env_id": "demo/A-v0",
        "task_id": f"t{task}",
        "group_id": f"g{task}",
        "member": member,
        "stop_reason": StopReason.FINAL_ANSWER,
        "reward": reward,
        "answer": str(reward),
        "total_tokens": 30,
        "trained_tokens": 10,
        "sampled_tokens": 10,
    }
    return EpisodeSummary(**{**defaults, **values})


def failed(task: int, member: int = 0, why: str = "env: KeyError: x") -> EpisodeSummary:
    return episode(task, member, None, stop_reason=StopReason.ERROR, error=why)


def test_failed_episodes_are_counted_and_kept_out_of_every_mean():
    report = report_on([episode(0), episode(1, reward=0.0), failed(2), failed(3)])

    assert report.reward is not None
    assert (report.reward.mean, report.num_scored, report.num_episodes) == (0.5, 2, 4)
    assert report.errors[0].count == 2
    assert report.warnings[0].startswith("2 of 4 episodes have no score and are not part of any mean: ")
    assert report_on([episode(0, 0), episode(0, 1, 0.0), episode(1, 0), failed(1, 1)]).num_tasks_at == {
        1: 2,
        2: 1,
    }


def many(count: int, *rewards: float | None, **values: object) -> list[EpisodeSummary]:
    """As many tasks, each with an episode for each reward."""
    return [
        episode(task, member, reward, **values)
        for task in range(count)
        for member, reward in enumerate(rewards)
    ]


SPREAD, SAME = "no gradient", "does reward() tell answers apart"
NONE, EMPTY = (
    "(1 got None as a reward; does reward() return a number?)",
    "2 of 3 final answers are empty, and",
)
WARNED = [
    ([episode(0), episode(1, reward=None), failed(2)], NONE, True),
    ([episode(9), *many(2, 0.0, answer="")], EMPTY, True),
    (many(5, 1.0, stop_reason=StopReason.MAX_TURNS), "raise max_turns", True),
    (many(5, 1.0, stop_reason=StopReason.GENERATION_LENGTH), "raise max_tokens_per_turn", True),
    (many(5, 1.0, stop_reason=StopReason.TOOL_OUTPUT_OVERFLOW), "lower max_tool_output_tokens", True),
    (many(5, 1.0), "raise max_turns", False),
    (many(3, 1.0, 1.0), SPREAD, False),
    (many(3, 0.0, 0.0), SPREAD, True),
    (many(3, 0.5, 0.5), SPREAD, True),
    (many(8, 0.5), SAME, True),
    (many(7, 0.5), SAME, False),
    (many(8, 1.0), SAME, False),
    ([*many(7, 0.5), episode(9, reward=0.0)], SAME, False),
]


@pytest.mark.parametrize(("episodes", "words", "told"), WARNED)
def test_what_is_odd_about_scores_and_stops_is_told_with_its_remedy(episodes, words, told):
    assert told == any(words in warning for warning in report_on(episodes).warnings)


def test_passes_are_unbiased_over_tasks():
    rewards = {0: [1, 1, 0, 0], 1: [0, 0, 0, 1], 2: [0, 0, 0, 0]}
    report = report_on(
        episode(task, member, float(value))
        for task, values in rewards.items()
        for member, value in enumerate(values)
    )

    # By hand: pairs of four with at least one pass, and with two, for 2, 1 and 0 passes.
    assert report.pass_at[2] == pytest.approx((5 / 6 + 3 / 6 + 0) / 3)
    assert report.pass_all[2] == pytest.approx((1 / 6 + 0 + 0) / 3)
    assert (report.num_groups, report.num_groups_with_spread) == (3, 2)


def test_majority_takes_the_most_frequent_answer_and_shares_ties():
    assert majority_share(["4", "4", "5"], [True, True, False]) == 1.0
    assert majority_share(["5", "5", "4"], [False, False, True]) == 0.0
    assert majority_share(["4", "5"], [True, False]) == 0.5


def test_tool_table_has_times_of_calls_that_ran_and_errors_by_kind():
    uses = [ToolUse("calc", t / 100) for t in range(1, 101)]
    uses += [
        ToolUse("calc", 9.0, "not_run", "not run"),
        ToolUse("calc", 0.5, "bad_arguments", "expression: field required"),
    ]
    (tool,) = report_on([episode(0, tools=tuple(uses))]).tools

    assert (tool.num_calls, dict(tool.errors)) == (102, {"not_run": 1, "bad_arguments": 1})
    assert tool.p50_s == pytest.approx(0.5)
    assert tool.p95_s == pytest.approx(0.95)


def test_a_report_shows_the_ten_tools_that_were_called_most():
    report = report_on(
        [episode(0, tools=tuple(ToolUse(f"tool{n:02}", 0.1) for n in range(30) for _ in range(n)))]
    )

    shown = [line for line in report_lines(report) if " calls" in line]

    assert (len(report.tools), len(shown)) == (29, 10)
    assert "tool29 29 calls" in shown[0]
    assert "and 19 more" in "\n".join(report_lines(report))


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("env: TaskError: task t0 lacks 'y'", "env: TaskError: task t1 lacks 'y'", True),
        ("env: KeyError: 'eins'", "env: KeyError: 'zwei'", True),
        ("model: Overloaded: request 8f3a-11", "model: Overloaded: request 77-bc2", True),
        ("env: KeyError: x", "env: ValueError: x", False),
    ],
)
def test_failures_that_differ_by_the_task_and_its_values_are_one_kind(first, second, same):
    errors = report_on([failed(0, why=first), failed(1, why=second)]).errors

    assert [error.count for error in errors] == ([2] if same else [1, 1])


def test_nothing_scored_and_nothing_at_all_are_said():
    assert report_on([failed(0)]).reward is None
    assert report_on([]).num_episodes == 0
    assert score_lines(report_on([failed(0)])) == ["reward   no episode has a score"]
    assert score_lines(report_on([episode(0, reward=0.5)])) == ["reward   mean 0.500 of one task"]
    assert report_lines(report_on([]))
    assert report_on(many(2, 1.0, stop_reason=StopReason.MAX_TURNS)).truncated_share == 1.0


@given(st.permutations(range(24)))
def test_order_of_episodes_changes_no_figure(order):
    episodes = [
        episode(
            task, member, (task * 7 + member * 3) % 5 / 7, rewards={"a": task / 3}, timings={"b": task / 7}
        )
        for task in range(6)
        for member in range(4)
    ]

    assert report_on([episodes[place] for place in order]).as_json() == report_on(episodes).as_json()


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_more_attempts_never_lower_pass_at_k_nor_raise_pass_all(passed):
    report = report_on(episode(0, member, float(value)) for member, value in enumerate(passed))

    assert all(a <= b + 1e-12 for a, b in pairwise(report.pass_at.values()))
    assert all(a >= b - 1e-12 for a, b in pairwise(report.pass_all.values()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "many"])
def test_costs_and_tokens_are_summed_where_a_sum_can_be_made(value):
    priced = [episode(task, metrics={"cost_usd": 0.25, "prompt_tokens": 40.0}) for task in range(3)]
    odd = episode(4, metrics={"prompt_tokens": value, "cost_usd": value})

    assert report_on([*priced, episode(9)]).cost_usd == 0.75
    assert report_on([priced[0], episode(2, total_tokens=9, trained_tokens=2)]).prompt_tokens == 47
    report = report_on([episode(0), odd])
    assert (report.cost_usd, report.prompt_tokens) == (None, 40)
    assert report_lines(report)
