"""Reports: every figure against a count by hand, whatever the order of the episodes."""

from __future__ import annotations

from dataclasses import replace
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


def test_rewards_of_none_are_told_from_failures():
    report = report_on([episode(0), episode(1, reward=None), failed(2)])

    assert "(1 got None as a reward; does reward() return a number?)" in report.warnings[0]


def test_answers_without_a_word_are_told():
    report = report_on([episode(0), *(episode(task, reward=0.0, answer="") for task in (1, 2))])

    assert "2 of 3 final answers are empty, and are scored like any other" in " ".join(report.warnings)


def test_a_mean_of_one_task_has_no_interval():
    assert score_lines(report_on([episode(0, reward=0.5)])) == ["reward   mean 0.500 of one task"]


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


def test_tasks_with_too_few_scored_episodes_are_left_out_of_that_k():
    report = report_on([episode(0, 0), episode(0, 1, 0.0), episode(1, 0), failed(1, 1)])

    assert report.num_tasks_at == {1: 2, 2: 1}
    assert report.pass_at[2] == 1.0


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
    assert report_lines(report_on([]))


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        (StopReason.MAX_TURNS, "raise max_turns"),
        (StopReason.GENERATION_LENGTH, "raise max_tokens_per_turn"),
        (StopReason.TOOL_OUTPUT_OVERFLOW, "lower max_tool_output_tokens"),
    ],
)
def test_frequent_limits_come_with_their_remedy(reason, remedy):
    report = report_on([episode(task, stop_reason=reason) for task in range(5)])

    assert any(remedy in warning for warning in report.warnings)
    assert report.truncated_share == 1.0


@pytest.mark.parametrize(("reward", "warned"), [(1.0, False), (0.0, True), (0.5, True)])
def test_groups_without_spread_are_warned_of_unless_everything_is_solved(reward, warned):
    report = report_on([episode(task, member, reward) for task in range(3) for member in range(2)])

    assert any("no gradient" in warning for warning in report.warnings) == warned


@given(st.permutations(range(24)))
def test_order_of_episodes_changes_no_figure(order):
    episodes = [
        episode(
            task,
            member,
            ((task * 7 + member * 3) % 5) / 7,
            rewards={"a": task / 3},
            timings={"generate_s": task / 7},
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


def test_costs_are_summed_where_an_api_gives_them():
    priced = [replace(episode(task), metrics={"cost_usd": 0.25}) for task in range(3)]

    assert report_on([*priced, episode(9)]).cost_usd == 0.75


def test_tokens_that_an_api_counted_are_the_tokens_read():
    counted = replace(episode(1), metrics={"prompt_tokens": 40.0}, total_tokens=0, trained_tokens=0)
    recorded = replace(episode(2), total_tokens=9, trained_tokens=2)

    assert report_on([counted, recorded]).prompt_tokens == 47


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "many"])
def test_counts_that_no_sum_can_be_made_with_are_not_counted(value):
    report = report_on([episode(0), episode(1, metrics={"prompt_tokens": value, "cost_usd": value})])

    assert (report.cost_usd, report.prompt_tokens) == (None, 40)
    assert report_lines(report)


@pytest.mark.parametrize(
    ("rewards", "told"),
    [([0.5] * 8, True), ([0.5] * 7, False), ([1.0] * 8, False), ([0.5] * 7 + [0.0], False)],
)
def test_a_reward_that_is_always_the_same_is_told(rewards, told):
    report = report_on([episode(task, reward=reward) for task, reward in enumerate(rewards)])

    assert told == any("does reward() tell answers apart" in warning for warning in report.warnings)
