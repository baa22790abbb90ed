"""`agentenv serve` and `agentenv sandbox serve`: what they start, and what they refuse."""

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import pytest

from agentenv.cli import main
from agentenv.core import SandboxUnavailable
from agentenv.sandbox import create

ENV = """
import agentenv as ae


class Say(ae.ToolEnv):
    def start(self, word: str) -> str:
        return f"Say {word}."

    def reward(self, answer: str, word: str) -> float:
        return float(answer == word)


ae.register("serve/Say-v0", Say, tasks=[{"word": "pear"}])
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_server_that_a_service_manager_ends_has_not_failed(number, code, monkeypatch):
    monkeypatch.setattr("sys.argv", ["agentenv", "serve", "model"])
    old = [(one, signal.getsignal(one)) for one in (signal.SIGTERM, signal.SIGINT)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr("agentenv.engine.vllm.launch.serve", lambda *_, **__: signal.raise_signal(number))
    try:
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == code
    finally:
        for one, handler in old:
            signal.signal(one, handler)


def test_a_model_is_served_to_agents_and_their_episodes_go_to_a_run(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    served = []

    async def capture(model, writer, guard, *, port, said):
        served.append((model.engine.name, writer.info.kind, guard.token, port))

    monkeypatch.setattr("agentenv.runs.capture.capture_forever", capture)

    assert command("serve", "--capture", "mock", "--token", "x" * 20, "--port", "0").code == 0
    assert served == [("mock", "eval", "x" * 20, 0)]
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_session_that_is_open_when_the_server_is_told_to_end_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with started("serve", "--capture", "mock") as (url, token):
        session = json.loads(asked(f"{url}/sessions", {"task": {"x": 1}}, token))
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        asked(f"{session['openai_base_url']}/chat/completions", body, "any")

    (run,) = (tmp_path / "runs").iterdir()
    (line,) = (run / "trajectories.jsonl").read_text().splitlines()
    assert json.loads(line)["stop_reason"] == "aborted"


@contextmanager
def started(*words):
    """Start a command and yield the address and the token that it says; end it without a failure."""
    command = [sys.executable, "-m", "agentenv", *words, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = ""
            while "token: " not in said:
                line = process.stderr.readline()
                assert line, f"the server ended: {said}"
                said += line
            url = "http://" + said.partition("http://")[2].split()[0].rstrip(";")
            yield url, said.partition("token: ")[2].split()[0]
        finally:
            process.terminate()
            process.communicate(timeout=30)
    assert process.returncode == 0


def asked(url, data=None, token=""):
    body = None if data is None else json.dumps(data).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = Request(url, data=body, headers=headers)
    with build_opener(ProxyHandler({})).open(request, timeout=30) as response:
        return response.read()


def test_an_environment_is_served_until_it_is_stopped(tmp_path):
    (tmp_path / "say.py").write_text(ENV)

    with started("serve", "--env", str(tmp_path / "say.py")) as (url, token):
        with pytest.raises(HTTPError, match="401"):
            asked(f"{url}/reset", {"seed": 1})
        first = json.loads(asked(f"{url}/reset", {"seed": 1}, token))
        last = json.loads(asked(f"{url}/step", {"action": {"content": "pear"}}, token))

    assert first["observation"]["messages"] == [{"role": "user", "content": "Say pear."}]
    assert (last["reward"], last["done"]) == (1.0, True)


@pytest.mark.sandbox
def test_the_sandbox_is_served_until_it_is_stopped():
    async def try_it():
        async with create("auto", size=1):
            pass

    try:
        asyncio.run(try_it())
    except SandboxUnavailable as error:
        pytest.skip(f"UNTESTED: no sandbox on this machine: {error}")

    with started("sandbox", "serve", "--size", "1") as (url, token):
        assert asked(f"{url}/health") == b""
        with pytest.raises(HTTPError, match="401"):
            asked(f"{url}/sandboxes", {})
        assert b"sandboxID" in asked(f"{url}/sandboxes", {}, token)
