"""Shared by every test: no network but loopback, deterministic hypothesis profiles, a clean registry."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
_SAME = {"deadline": None, "derandomize": True, "suppress_health_check": _QUIET}
settings.register_profile("default", max_examples=30, **_SAME)
settings.register_profile("ci", max_examples=100, **_SAME)
settings.register_profile("deep", max_examples=2000, deadline=None, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

_connect = socket.socket.connect


def _guarded_connect(self: socket.socket, address: object) -> None:
    """Let sockets reach this machine only, so that no test depends on the network."""
    if self.family in (socket.AF_INET, socket.AF_INET6):
        host = str(address[0])  # type: ignore[index]
        if host not in {"127.0.0.1", "::1", "localhost", "0.0.0.0"}:
            raise OSError(f"tests must not use the network: tried to reach {host}")
    _connect(self, address)  # type: ignore[arg-type]


@pytest.fixture(autouse=True, scope="session")
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Keep the key that signs runs out of the home directory, also in processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _other_processes_are_covered_too() -> Generator[None]:
    """Where coverage runs, record what our programs do in processes of their own, such as the jail."""
    if (coverage := sys.modules.get("coverage")) is None or (running := coverage.Coverage.current()) is None:
        yield
        return
    from helpers.measured.recorder import Recorder

    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        recorder.install(patch)
        yield
    recorder.write(Path(running.get_data().data_filename()).with_name(f".coverage.lines.{os.getpid()}"))


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", _guarded_connect)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave properties and whole runs out of what is covered: tracing would double their time."""
    tests = Path(__file__).parent
    for item in items:
        if item.path.relative_to(tests).parts[0] in {"property", "e2e"}:
            item.add_marker("untraced")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Take coverage's tracer away while a test marked `untraced` runs, and its fixtures.

    pytest-cov's own marker does not do so in a process of pytest-xdist, where it starts two tracers.
    """
    tracer, of_threads = sys.gettrace(), threading.gettrace()
    if tracer is None or item.get_closest_marker("untraced") is None:
        return (yield)
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)
        threading.settrace(of_threads)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))
