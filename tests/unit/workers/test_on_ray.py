"""Workers on a Ray cluster of this machine: the same episodes as in one process, also when actors are killed."""

from __future__ import annotations

import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from agentenv.core import StopReason, UsageError
from agentenv.runs import evaluate, rollout
from helpers.worker_runs import DEADLY, truth

ray: Any = pytest.importorskip("ray", reason="ray is not installed (pip install 'agentenv-rl[ray]')")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray's own sockets
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # everything listens on loopback
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
            logging_level=logging.ERROR,
        )
        yield
        ray.shutdown()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def episodes(split: str, num_tasks: int, directory: str = "", **settings: Any):
    groups = rollout(
        DEADLY,
        "random",
        num_tasks=num_tasks,
        group_size=2,
        split=split,
        env={"directory": directory},
        limits={"max_turns": 3},
        **settings,
    )
    return [episode for group in groups for episode in group]


def test_four_hundred_episodes_survive_the_death_of_two_of_three_actors(tmp_path: Path):
    whole = truth(episodes("once", 200))

    played = truth(episodes("once", 200, str(tmp_path), workers=3, ray="auto"))

    assert len(list(tmp_path.glob("killed-*"))) == 2
    assert played == whole
    assert len(whole) == 400


@pytest.mark.exhaustive  # it starts many actors; the rules themselves are tested with other workers
def test_a_poison_episode_ends_alone(tmp_path: Path):
    whole = truth(episodes("poison", 10))

    played = episodes("poison", 10, str(tmp_path), workers=2, ray="auto")

    bad = [one for one in played if one.task["x"] == 3]
    good = truth(one for one in played if one.task["x"] != 3)
    assert {(one.stop_reason, one.error.boundary) for one in bad if one.error} == {
        (StopReason.ABORTED, "worker")
    }
    assert good == {key: whole[key] for key in good}
    assert (len(bad), len(good)) == (2, 18)


def test_more_workers_than_processors_are_refused():
    with pytest.raises(UsageError, match="has 4 CPUs, too few for 9 workers"):
        evaluate(DEADLY, "random", num_tasks=2, workers=9, ray="auto")
