"""A failed run tells a person once, and its error comes through."""

from __future__ import annotations

import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

pytest.importorskip("apprise", reason="apprise is not installed")

import agentenv as ae
from agentenv.core import AgentEnvError
from agentenv.training.loop.journal import Journal
from helpers.prompts import trainer_of
from helpers.training import saved_tiny

# apprise loads all its plugins at the first address, and one of them a module that Python deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr':DeprecationWarning")


@pytest.fixture
def inbox():
    received = []

    class Inbox(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Inbox)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"json://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()
    thread.join()


def fail(trainer, message: str = "broken") -> None:
    with pytest.raises(ValueError, match=message), Journal(trainer.grpo):
        raise ValueError(message)


def test_one_notice_for_a_launch_that_fails_on_every_rank(inbox, tmp_path, monkeypatch):
    address, received = inbox
    monkeypatch.setenv("MASTER_PORT", "4711")
    ranks = [trainer_of(tmp_path / "run", notify=(address,)) for _ in range(3)]

    for number, trainer in enumerate(ranks):
        fail(trainer, f"broken on rank {number}")

    assert [one["title"] for one in received] == ["failed: training run run after 0 steps"]
    assert received[0]["message"] == "ValueError: broken on rank 0"


def test_a_later_run_in_the_same_directory_is_told_too(inbox, tmp_path, monkeypatch):
    address, received = inbox
    monkeypatch.delenv("MASTER_PORT", raising=False)

    for _ in range(2):
        fail(trainer_of(tmp_path, notify=(address,)))

    assert len(received) == 2


@pytest.mark.parametrize("address", ["nothing://at-all", "json://127.0.0.1:9"])
def test_a_notice_that_cannot_be_sent_is_only_logged(address, tmp_path, caplog):
    fail(trainer_of(tmp_path, notify=(address,)))

    assert "the notice did not reach" in caplog.text


def test_without_addresses_nothing_is_written(tmp_path):
    fail(trainer_of(tmp_path / "run"))

    assert not (tmp_path / "run" / "notices").exists()


def test_a_failing_run_sends_one_notice_and_raises_its_own_error(inbox, tmp_path, monkeypatch):
    address, received = inbox
    monkeypatch.delenv("MASTER_PORT", raising=False)
    trainer = trainer_of(tmp_path, notify=(address,), on_metrics=lambda step, metrics: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        trainer.train()

    assert [one["title"].rpartition("after")[2] for one in received] == [" 1 steps"]
    assert received[0]["message"] == "ZeroDivisionError: division by zero"


def test_a_run_that_ends_well_tells_nobody(inbox, tmp_path):
    address, received = inbox
    trainer_of(tmp_path, notify=(address,)).train()
    assert received == []


def test_a_run_whose_other_processes_were_interrupted_first_is_interrupted_too(inbox, tmp_path):
    address, received = inbox

    def others_are_gone(step, metrics):
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("connection closed by peer")

    trainer = trainer_of(tmp_path, notify=(address,), on_metrics=others_are_gone)
    # A shell that starts the tests in the background lets them ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == []


def test_an_unreachable_address_does_not_hide_the_error(tmp_path):
    trainer = trainer_of(tmp_path, notify=("json://127.0.0.1:9",), on_metrics=lambda step, metrics: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()


def test_the_addresses_stay_out_of_what_trackers_are_told(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    trainer = trainer_of(tmp_path, notify=("json://user:secret@127.0.0.1",), report_to=("tensorboard",))
    trainer.train()
    assert not any(b"secret" in one.read_bytes() for one in tmp_path.rglob("*") if one.is_file())


@pytest.mark.parametrize("ends", ["the model", "the demonstrations"])
def test_what_ends_a_run_before_its_first_step_is_told_too(inbox, tmp_path, monkeypatch, ends):
    address, received = inbox
    monkeypatch.delenv("MASTER_PORT", raising=False)
    model = saved_tiny(tmp_path)
    if ends == "the model":
        (tmp_path / "model.safetensors").write_bytes(b"damaged")

    def failing(messages, task, random):
        raise ValueError("the oracle is gone")

    with pytest.raises(AgentEnvError):
        ae.train(
            "agentenv/Calculator-v0", model, steps=1, demos=failing, runs_dir=tmp_path / "runs",
            notify=[address],
        )  # fmt: skip

    assert [one["title"].partition("run")[0] for one in received] == ["failed: training "]
