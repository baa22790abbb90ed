"""Servers that are not there, or never answer, are told before anything else, whoever would ask them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

import pytest

import agentenv as ae
from agentenv.core import EngineUnavailable
from agentenv.engine import check_answers, load_engine
from agentenv.envs import EnvSpec
from agentenv.envs.rewards import Judge
from agentenv.testing import check_env


@pytest.fixture(autouse=True)
def limit(monkeypatch):
    """The 5 s are shorter here, and no proxy stands in between."""
    monkeypatch.setattr("agentenv.engine.reach.ANSWERS_WITHIN_S", 0.5)
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture(params=["nobody listens", "never answers"])
def address(request):
    listener = socket.create_server(("127.0.0.1", 0))
    if request.param == "nobody listens":
        listener.close()
        with socket.create_server(("127.0.0.1", 0)) as once:
            port = once.getsockname()[1]
        yield f"http://127.0.0.1:{port}/v1"
        return
    with listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


def test_what_answers_anything_is_there():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            asked, _ = listener.accept()
            with asked:
                asked.recv(1000)
                asked.sendall(b"HTTP/1.1 500 no\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        check_answers("it", f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


def by_provider(form: str) -> Callable[[str], object]:
    def begin(address: str) -> object:
        pytest.importorskip("pydantic_ai")
        return load_engine(f"{form}:some", api_key="none", base_url=address)

    return begin


def train(address: str) -> object:
    return ae.train("agentenv/Calculator-v0", address, total_steps=1)


def judged(address: str) -> EnvSpec:
    return EnvSpec.of(
        "reach/Judged-v0", Plain, tasks=[{"x": 1}], rewards=[Judge(address, "Is this right: {answer}")]
    )


class Plain(ae.ToolEnv):
    """Is judged."""

    def start(self, x: int) -> str:
        return "Say anything."


BEGINNINGS: dict[str, Callable[[str], object]] = {
    "openai": lambda address: load_engine("openai:some", base_url=address, api_key="none"),
    "http": load_engine,
    "train": train,
    "evaluate": lambda address: ae.evaluate("agentenv/Calculator-v0", address, num_tasks=1),
    "anthropic": by_provider("anthropic"),
    "mistral": by_provider("mistral"),
}


@pytest.mark.parametrize("begin", BEGINNINGS.values(), ids=BEGINNINGS)
def test_a_server_that_does_not_answer_is_told_at_once(begin, address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EngineUnavailable, match=r"does not answer: (Connection refused|timed out)"):
        begin(address)
    assert list(tmp_path.iterdir()) == [], "no run was made"


def check(spec: EnvSpec) -> object:
    return asyncio.run(check_env(spec))


def evaluate(spec: EnvSpec) -> object:
    return ae.evaluate(spec, "scripted:yes")


@pytest.mark.parametrize("begin", [check, evaluate])
def test_a_judge_that_does_not_answer_is_told_before_the_first_episode(begin, address):
    with pytest.raises(EngineUnavailable, match="does not answer"):
        begin(judged(address))
