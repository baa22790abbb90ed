"""Every statistic against an independent reference: brute force, numpy, or a printed table."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.runs import pass_at_k
from agentenv.runs.stats import (
    RunningMean,
    bootstrap_mean,
    clustered_mean,
    pass_all_k,
    quantile,
    student_t_quantile,
)

outcomes = st.lists(st.booleans(), min_size=1, max_size=8)


def half_width(interval):
    return (interval.high - interval.low) / 2


@given(outcomes, st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(passed, data):
    k = data.draw(st.integers(1, len(passed)))
    subsets = list(combinations(passed, k))

    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(np.mean([any(one) for one in subsets]))
    assert pass_all_k(len(passed), sum(passed), k) == pytest.approx(np.mean([all(one) for one in subsets]))


@pytest.mark.parametrize(("tried", "passed", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1)])
def test_impossible_pass_at_k_is_refused(tried, passed, k):
    with pytest.raises(ValueError, match="attempts"):
        pass_at_k(tried, passed, k)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.floats(0, 1))
def test_quantile_is_numpys(values, share):
    assert quantile(values, share) == pytest.approx(np.quantile(values, share), abs=1e-6)


# Quantiles as printed in statistical tables.
@pytest.mark.parametrize(
    ("share", "degrees", "printed"),
    [
        (0.975, 1, 12.706),
        (0.975, 4, 2.776),
        (0.975, 19, 2.093),
        (0.975, 120, 1.980),
        (0.95, 7, 1.895),
        (0.995, 10, 3.169),
    ],
)
def test_t_quantile_is_the_printed_one(share, degrees, printed):
    assert student_t_quantile(share, degrees) == pytest.approx(printed, abs=6e-4)
    assert student_t_quantile(1 - share, degrees) == pytest.approx(-printed, abs=6e-4)


@given(st.lists(st.lists(st.floats(-9, 9), min_size=3, max_size=3), min_size=2, max_size=8))
def test_equal_clusters_give_the_interval_of_their_means(clusters):
    found = clustered_mean({str(place): values for place, values in enumerate(clusters)})
    means = [np.mean(values) for values in clusters]
    if any(value not in (0.0, 1.0) for values in clusters for value in values):
        spread = student_t_quantile(0.975, len(means) - 1) * np.std(means, ddof=1) / np.sqrt(len(means))
        assert half_width(found) == pytest.approx(spread, abs=1e-6)
    assert found.mean == pytest.approx(np.mean(means), abs=1e-9)
    assert (found.num_values, found.num_clusters) == (3 * len(clusters), len(clusters))


@pytest.mark.parametrize("tasks", range(2, 40))
def test_all_passed_is_not_certainty(tasks):
    # Wilson at n of n: z^2 / (n + z^2) below 1, with z = 1.959964.
    found = clustered_mean({str(task): [1.0, 1.0] for task in range(tasks)})
    none = clustered_mean({str(task): [0.0] for task in range(tasks)})

    assert found.low == pytest.approx(1 - 1.959964**2 / (tasks + 1.959964**2), abs=1e-6)
    assert (found.mean, found.high, none.low, none.mean) == (1.0, 1.0, 0.0, 0.0)
    one = clustered_mean({"only": [0.0, 1.0, 1.0, 0.0]})  # measured over its episodes
    assert one.num_clusters == 4
    assert one.low < 0.5 < one.high


def test_interval_covers_the_truth_as_often_as_it_says():
    draw = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        chances = draw.beta(2, 2, size=25)
        found = clustered_mean({str(i): list(map(float, draw.random(4) < p)) for i, p in enumerate(chances)})
        hits += found.low <= 0.5 <= found.high

    assert 0.92 <= hits / 400 <= 0.98


def test_bootstrap_interval_is_close_to_the_normal_one_and_repeats():
    values = list(np.random.default_rng(0).normal(0.3, 1.0, size=200))

    found = bootstrap_mean(values, resamples=1000)

    assert found == bootstrap_mean(values, resamples=1000)
    assert half_width(found) == pytest.approx(1.96 * np.std(values) / np.sqrt(200), rel=0.1)


@pytest.mark.parametrize(
    "function",
    [bootstrap_mean, lambda _: clustered_mean({}), lambda _: quantile([], 0.5), lambda _: RunningMean().interval()],
)  # fmt: skip
def test_no_values_is_said(function):
    with pytest.raises(ValueError, match="at least one value"):
        function([])
    assert RunningMean().mean == 0.0


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from([0.0, 1.0]) | st.floats(-5, 5, width=32)),
        min_size=1,
        max_size=30,
    ),
    st.booleans(),
)
def test_running_mean_has_the_interval_of_the_clustered_mean(values, whole):
    running = RunningMean()
    clusters: dict[str, list[float]] = {}
    for cluster, value in values:
        number = float(value > 0.5) if whole else value
        running.add(cluster, number)
        clusters.setdefault(cluster, []).append(number)

    expected, found = clustered_mean(clusters), running.interval()

    assert (found.num_values, found.num_clusters) == (expected.num_values, expected.num_clusters)
    assert found.mean == pytest.approx(expected.mean, abs=1e-9)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-5)
