"""A failed run tells a person once, and its error comes through."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

pytest.importorskip("apprise", reason="apprise is not installed")

from agentenv.train.notices import FailureNotice

_spec = spec_from_file_location("prompts_helpers", Path(__file__).with_name("test_prompts.py"))
assert _spec is not None
assert _spec.loader is not None
helpers = module_from_spec(_spec)
_spec.loader.exec_module(helpers)
trainer_of = helpers.trainer_of

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


def test_one_notice_for_a_failure_that_every_rank_meets(inbox, tmp_path, monkeypatch):
    address, received = inbox
    monkeypatch.setenv("MASTER_PORT", "4711")
    ranks = [FailureNotice([address], directory=tmp_path / "run") for _ in range(3)]

    sent = [one.send(ValueError("broken"), steps=7) for one in ranks]

    assert sent == [True, False, False]
    assert len(received) == 1
    assert received[0]["title"] == "training run run failed"
    assert received[0]["message"] == "after 7 steps: ValueError: broken"


def test_a_later_run_in_the_same_directory_is_told_too(inbox, tmp_path, monkeypatch):
    address, received = inbox
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for _ in range(2):
        assert FailureNotice([address], directory=tmp_path).send(ValueError("broken"), steps=1)
    assert len(received) == 2


@pytest.mark.parametrize("address", ["nothing://at-all", "json://127.0.0.1:9"])
def test_a_notice_that_cannot_be_sent_is_only_logged(address, tmp_path, caplog):
    assert not FailureNotice([address], directory=tmp_path).send(ValueError("broken"), steps=1)
    assert "failure notice" in caplog.text


def test_without_addresses_nothing_is_written(tmp_path):
    assert not FailureNotice([], directory=tmp_path / "run").send(ValueError("broken"), steps=1)
    assert not (tmp_path / "run").exists()


def test_a_failing_run_sends_one_notice_and_raises_its_own_error(inbox, tmp_path, monkeypatch):
    address, received = inbox
    monkeypatch.delenv("MASTER_PORT", raising=False)
    trainer = trainer_of(tmp_path, notify=(address,))
    trainer.on_metrics = lambda step, metrics: 1 / 0

    with pytest.raises(ZeroDivisionError):
        trainer.train()

    assert [one["message"] for one in received] == ["after 1 steps: ZeroDivisionError: division by zero"]


def test_a_run_that_ends_well_tells_nobody(inbox, tmp_path):
    address, received = inbox
    trainer_of(tmp_path, notify=(address,)).train()
    assert received == []


def test_an_unreachable_address_does_not_hide_the_error(tmp_path):
    trainer = trainer_of(tmp_path, notify=("json://127.0.0.1:9",))
    trainer.on_metrics = lambda step, metrics: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train()


def test_the_addresses_stay_out_of_what_trackers_are_told(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    trainer = trainer_of(tmp_path, notify=("json://user:secret@127.0.0.1",), report_to=("tensorboard",))
    trainer.train()
    assert not any(b"secret" in one.read_bytes() for one in tmp_path.rglob("*") if one.is_file())


def test_two_processes_that_fail_together_send_one_notice(inbox, tmp_path):
    address, received = inbox
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from agentenv.train.notices import FailureNotice\n"
        "FailureNotice([sys.argv[1]], directory=Path(sys.argv[2])).send(ValueError('broken'), steps=3)\n"
    )
    env = {**os.environ, "MASTER_PORT": "4712"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, address, str(tmp_path)], env=env) for _ in range(2)
    ]
    assert [one.wait(timeout=120) for one in ranks] == [0, 0]
    assert len(received) == 1
