"""Task sets of verifiers.v1, played by verifiers itself against our endpoint; `make test-peers` runs them."""

import sys
from pathlib import Path

import pytest

from agentenv.core import UsageError
from agentenv.envs import spec
from agentenv.runs import evaluate

pytestmark = pytest.mark.engine
pytest.importorskip("verifiers.v1", reason="UNTESTED: verifiers is not installed")

SUMS = '''
import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    most: int = 3


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        for n in range(self.config.most):
            yield Sum(Data(idx=n, prompt=f"What is {n} + 1?", system_prompt="Be short.", answer=str(n + 1)))


class TwiceConfig(vf.HarnessConfig):
    pass


class Twice(vf.Harness[TwiceConfig]):
    """Asks, and asks again; without a program, whose packages `uv` would fetch."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [
            {"role": "system", "content": data.system_prompt},
            {"role": "user", "content": data.prompt_text},
        ]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as sdk:
            for _ in range(2):
                said = await sdk.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": said.choices[0].message.content})
                messages.append({"role": "user", "content": "Are you sure?"})
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Sums", "Twice"]
'''
DUEL = (
    SUMS
    + """

class DuelConfig(vf.EnvConfig):
    one: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()


class Duel(vf.Env[DuelConfig]):
    async def run(self, task, agents):
        await agents.one.run(task)


__all__ = ["Duel", "Sums", "Twice"]
"""
)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that writes a package of a task set."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(name: str, text: str) -> str:
        Path(tmp_path, f"{name}.py").write_text(text)
        return f"verifiers:{name}"

    yield write
    for name in {"sums_v1", "duel_v1"} - before:
        sys.modules.pop(name, None)


def test_a_task_set_is_played_and_scored_by_verifiers_and_its_tokens_are_kept(installed):
    result = evaluate(installed("sums_v1", SUMS), "scripted:It is 2.", num_tasks=None)
    played = [episode for group in result.groups for episode in group]

    assert [episode.error for episode in played] == [None] * 3
    assert [(episode.reward, dict(episode.rewards)) for episode in played] == [
        (0.0, {"right": 0.0, "length": 8.0}),
        (0.5, {"right": 0.5, "length": 8.0}),
        (0.0, {"right": 0.0, "length": 8.0}),
    ]
    assert [message["role"] for message in played[1].messages][:3] == ["system", "user", "assistant"]
    assert [(len(episode.turns), len(episode.sequences)) for episode in played] == [(2, 1)] * 3
    assert all(episode.trainable for episode in played)


def test_a_limit_of_the_run_ends_the_episode_as_a_limit(installed):
    from agentenv.core import RunLimits

    ((episode,),) = evaluate(
        installed("sums_v1", SUMS), "scripted:It is 1.", num_tasks=1, limits=RunLimits(max_turns=1)
    ).groups

    assert episode.stop_reason == "max_turns"


def test_settings_of_a_task_set_are_arguments_and_a_wrong_one_is_refused(installed):
    entry = spec(installed("sums_v1", SUMS))

    assert len(entry.task_set()) == 3
    assert entry.make(most=2)
    with pytest.raises(UsageError, match=r"verifiers:sums_v1 cannot be made: .*least"):
        entry.make(least=2)


def test_a_task_set_with_several_roles_is_refused_with_the_command_that_plays_it(installed):
    entry_of = installed("duel_v1", DUEL)

    with pytest.raises(UsageError, match=r"episodes of duel_v1 have several roles.*traces\.jsonl"):
        list(spec(entry_of).task_set())
