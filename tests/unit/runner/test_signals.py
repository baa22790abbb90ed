"""Code that sets signals: told what helps where it runs in a thread, and run where it can."""

import signal
from pathlib import Path

import pytest

from agentenv.cli import main
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.runs import evaluate, find_run

WITH_A_LIMIT = '''
import signal
import agentenv as ae

class Limited(ae.ToolEnv):
    """Score with an alarm."""

    tasks = [{}]

    def start(self):
        return "Go."

    async def reward(self, answer):
        before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.alarm(9)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        return 1.0
'''


class Limited(ToolEnv):
    """Score with an alarm."""

    def start(self) -> str:
        return "Go."

    def reward(self) -> float:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return 1.0


def message_of_the_only_episode(env: type[ToolEnv]) -> str:
    """Play one episode, and return what it failed of."""
    result = evaluate(EnvSpec.of("test/Limited-v0", env), "scripted:Done.", num_tasks=1)
    return result.groups[0][0].error.message


def test_a_reward_that_sets_a_signal_in_a_thread_is_told_what_helps():
    told = message_of_the_only_episode(Limited)

    assert told.startswith("signals work in the main thread alone")
    assert "async def" in told
    assert "isolated=True" in told


def test_the_time_limit_of_math_verify_is_told_what_helps():
    math_verify = pytest.importorskip("math_verify", reason="UNTESTED: math-verify is not installed")

    class Compared(Limited):
        def reward(self, answer: str) -> float:
            return float(math_verify.verify(math_verify.parse("$1$"), math_verify.parse(answer)))

    assert "async def" in message_of_the_only_episode(Compared)


def test_an_asynchronous_reward_can_set_signals_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("limited.py").write_text(WITH_A_LIMIT)

    with pytest.raises(SystemExit) as ended:
        main(["eval", "limited.py", "-m", "scripted:Done.", "--runs-dir", "runs"])

    assert ended.value.code == 0
    assert [episode.reward for episode in find_run("last", "runs")] == [1.0]
