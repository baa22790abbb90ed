"""Metrics of a step: what is counted for each environment and tool, and how processes are put together."""

from __future__ import annotations

import json
import math
import pickle

import pytest

from agentenv.core import StopReason, ToolErrorKind, ToolResult, Trajectory, TrajectoryGroup, Turn
from agentenv.training.learners.torch.world import _merged
from agentenv.training.loop.journal import JsonLines
from agentenv.training.metrics import Mean, Spread, Update, episode_metrics, update_metrics


def episode(
    env: str, reward: float, *results: tuple[str, bool], stop: StopReason = StopReason.FINAL_ANSWER
) -> Trajectory:
    answers = tuple(
        ToolResult(f"c{n}", name, "x", ToolErrorKind.EXCEPTION if failed else None)
        for n, (name, failed) in enumerate(results)
    )
    turn = Turn(0, {"role": "assistant", "content": "x"}, "stop", 3, tool_results=answers, reward=reward)
    return Trajectory(env, "t", 0, f"{env}:t", stop, turns=(turn,), reward=reward, rewards={"part": reward})


def test_each_tool_has_its_error_rate_and_each_environment_its_own_metrics():
    groups = [
        TrajectoryGroup(
            (episode("a", 1.0, ("add", False), ("add", True)), episode("a", 0.0, ("look", False)))
        ),
        TrajectoryGroup((episode("b", 0.25, stop=StopReason.MAX_TURNS),)),
    ]

    metrics = episode_metrics(groups)

    assert metrics["tool/add/error_rate"] == 0.5
    assert metrics["tool/look/error_rate"] == 0.0
    assert metrics["a/tool/add/error_rate"] == 0.5
    assert "b/tool/add/error_rate" not in metrics
    assert metrics["tools/failure_frequency"] == pytest.approx(1 / 3)
    assert (metrics["a/reward"], metrics["b/reward"]) == (0.5, 0.25)
    assert (metrics["a/completions/clipped_ratio"], metrics["b/completions/clipped_ratio"]) == (0.0, 1.0)
    assert metrics["stop/final_answer"] == 2
    assert metrics["b/stop/max_turns"] == 1
    assert metrics["rewards/part/mean"] == pytest.approx(1.25 / 3)


def test_one_environment_is_not_listed_twice():
    assert not any(name.startswith("a/") for name in episode_metrics([TrajectoryGroup((episode("a", 1.0),))]))


@pytest.mark.parametrize(
    ("name", "merged"),
    [
        ("episodes", 6.0),
        ("stop/max_turns", 6.0),
        ("dropped/stale_episodes", 6.0),
        ("loss", 6.0),
        ("completions/max_length", 5.0),
        ("completions/min_length", 1.0),
        ("mismatch/abs_max", 5.0),
        ("staleness/max", 5.0),
        ("clip_ratio/low_min", 1.0),
        ("clip_ratio/high_max", 5.0),
        ("time/update", 3.0),
        ("grad_norm", 3.0),
    ],
)
def test_processes_add_counts_keep_extremes_and_average_the_rest(name, merged):
    assert _merged(name, [1.0, 5.0]) == merged


def test_a_mean_over_processes_is_the_mean_over_all_that_they_counted():
    parts = [Mean(1.0, 1), Mean(15.0, 3), Mean(0.0, 0)]

    assert (parts[1], _merged("reward", parts)) == (5.0, 4.0)
    assert math.isnan(_merged("reward", [Mean(0.0, 0), Mean(0.0, 0)]))
    assert _merged("tools/failure_frequency", [Mean(0.0, 0, otherwise=0.0)]) == 0.0


def test_the_same_episodes_in_one_process_and_in_three_have_the_same_metrics():
    groups = [
        TrajectoryGroup((episode("a", 1.0, ("add", True)), episode("a", 0.5), episode("a", 0.25))),
        TrajectoryGroup((episode("b", 0.75, ("add", False), ("look", True), stop=StopReason.MAX_TURNS),)),
    ]
    parts = [
        pickle.loads(pickle.dumps(episode_metrics(part, gather=lambda _: ["a", "b"])))
        for part in ([], groups[:1], groups[1:])
    ]

    whole = episode_metrics(groups)

    assert {name for part in parts for name in part} == whole.keys()
    for name, value in whole.items():
        assert _merged(name, [part[name] for part in parts if name in part]) == pytest.approx(
            value, rel=1e-12
        )
    assert whole["rewards/part/std"] == Spread([1.0, 0.5, 0.25, 0.75]) == pytest.approx(0.3227486121839514)


def test_an_update_that_was_left_out_is_counted():
    metrics = update_metrics([Update(1.0, 2.0, True), Update(3.0, math.inf, False)])
    assert (metrics["updates"], metrics["updates/not_finite"], metrics["loss"]) == (1.0, 1.0, 2.0)
    assert update_metrics([]) == {"loss": 0.0, "grad_norm": 0.0, "updates": 0.0, "updates/not_finite": 0.0}


def test_a_resumed_file_has_each_step_once_and_loses_a_torn_line(tmp_path):
    lines = JsonLines(tmp_path / "deep" / "metrics.jsonl")
    for step in (1, 2, 3):
        lines.write(step, {"reward": step / 2, "kl": None})
    with lines.path.open("a") as file:
        file.write('{"step": 4, "rew')

    lines.forget_after(2)
    lines.write(3, {"reward": 9.0})

    held = [json.loads(line) for line in lines.path.read_text().splitlines()]
    assert [line["step"] for line in held] == [1, 2, 3]
    assert held[2]["reward"] == 9.0


@pytest.mark.parametrize(
    ("name", "values", "whole"),
    [
        ("demo/Adder-v0/episodes", [4.0, 2.0], 6.0),
        ("demo/Adder-v0/stop/max_turns", [1.0, 2.0], 3.0),
        ("reasoning_gym:countdown/stop/max_turns", [1.0, 2.0], 3.0),
        ("demo/Adder-v0/tool/stop/error_rate", [Mean(0.0, 1), Mean(2.0, 2)], 2 / 3),
        ("staleness/mixed_episodes", [1.0, 2.0], 3.0),
        ("reward", [Mean(0.0, 0), Mean(1.0, 2)], 0.5),
    ],
)
def test_counts_of_an_environment_add_up_and_a_process_without_rewards_is_left_out(name, values, whole):
    assert _merged(name, values) == whole
