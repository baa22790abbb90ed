"""What is checked before a Ray cluster is used, with a stand-in for Ray; the rest runs on a real cluster."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
from types import ModuleType, SimpleNamespace

import pytest

from agentenv.core import UsageError
from agentenv.workers.handshake import Handshake

RAY_WAITS = "RAY_gcs_rpc_server_reconnect_timeout_s"


class Cluster(ModuleType):
    """Stands in for the module `ray` and a cluster that it may reach."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.connected: list[str] = []
        self.refuses: Exception | None = None
        self.cpus, self.free = 8, 8
        self.gcs = "127.0.0.1:6379"

    def is_initialized(self) -> bool:
        return bool(self.connected)

    def init(self, *, address: str, **_: object) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.connected.append(address)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.cpus)}

    def available_resources(self) -> dict[str, float]:
        return {"CPU": float(self.free)}

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(gcs_address=self.gcs)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch):
    stand_in = Cluster()
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    monkeypatch.delitem(sys.modules, "agentenv.workers.on_ray", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv(RAY_WAITS, "")  # so that it is as before afterwards
    monkeypatch.delenv(RAY_WAITS)
    yield stand_in
    sys.modules.pop("agentenv.workers.on_ray", None)


def hire(address: str = "auto", workers: int = 2, **options):
    return importlib.import_module("agentenv.workers.on_ray").hire(
        address, "{}", workers, Handshake([]), **options
    )[0]


def test_a_cluster_with_room_is_used_once_without_a_word(cluster, caplog):
    make = hire()
    hire()

    assert cluster.connected == ["auto"]
    assert caplog.messages == []
    assert float(os.environ[RAY_WAITS]) > 60, "Ray would end the driver first"
    assert make("w1", False).name == "w1"
    assert [make("w", beside)._options["num_cpus"] for beside in (False, True)] == [1, 0]


@pytest.mark.parametrize(
    "said", ["Version mismatch: the cluster was started with Ray 2.40", "token authentication is required"]
)
def test_a_cluster_that_refuses_says_why_and_what_to_use(cluster, said):
    cluster.refuses = RuntimeError(f"{said}\nand much more")

    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with pytest.raises(UsageError, match=said) as told:
            hire(address)

    assert address in str(told.value)
    assert "RAY_AUTH_MODE=token" in str(told.value)
    assert "much more" not in str(told.value)


def test_a_cluster_that_has_gone_is_told_at_once(cluster):
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"

    with pytest.raises(UsageError, match=f"no Ray cluster answers at {address}") as told:
        hire(address)

    assert "--workers" in str(told.value)
    assert cluster.connected == []


def test_an_address_of_ray_client_is_refused(cluster):
    with pytest.raises(UsageError, match="loses the run"):
        hire("ray://10.1.2.3:10001")
    assert cluster.connected == []


def test_too_few_processors_and_busy_ones_are_told(cluster, caplog):
    hire(workers=8)
    assert caplog.messages == []  # exactly enough
    cluster.free = 1
    hire(workers=3)
    assert [message for message in caplog.messages if "only 1 CPUs" in message]

    hire(workers=9)
    assert [message for message in caplog.messages if "8 CPUs, too few for 9 workers of 1 each" in message]


def test_actors_get_the_variables_that_are_named_and_options_of_ray(cluster, monkeypatch):
    monkeypatch.setenv("SHOP_KEY", "s3cret")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("OTHER", "x")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    options = {
        "num_cpus": 2,
        "resources": {"shop": 1},
        "runtime_env": {"working_dir": ".", "env_vars": {"A": "1"}},
    }

    made = hire(worker_env=["SHOP_KEY", "EMPTY"], options=options)("w1", False)._options

    variables = {"SHOP_KEY": "s3cret", "EMPTY": "", "A": "1"}
    assert made["runtime_env"] == {"working_dir": ".", "env_vars": variables}
    assert (made["num_cpus"], made["resources"]) == (2, {"shop": 1})
    with pytest.raises(UsageError, match="worker_env names LACKING"):
        hire(worker_env=["LACKING"])
    with pytest.raises(UsageError, match="'max_restarts', which is no option"):
        hire(options={"max_restarts": 3})


@pytest.mark.parametrize(
    ("gcs", "mode", "warns"),
    [("127.0.0.1:6379", "", False), ("10.1.2.3:6379", "", True), ("10.1.2.3:6379", "token", False)],
)
def test_a_cluster_that_everybody_can_reach_is_warned_of(cluster, caplog, monkeypatch, gcs, mode, warns):
    cluster.gcs = gcs
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with caplog.at_level(logging.WARNING):
        hire()

    assert any("without authentication" in message for message in caplog.messages) == warns
