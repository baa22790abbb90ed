"""What outside code gets is a copy: nothing that a user changes reaches the record or another episode."""

from __future__ import annotations

from agentenv.core import EngineUnavailable, StopReason
from agentenv.engine import ScriptedEngine
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner, RunnerOptions, User, UserTurn
from agentenv.testing import tool_call
from agentenv.tools import tool

TOKENIZER = byte_tokenizer()


class Working(ToolEnv):
    def start(self, words: list) -> str:
        self.words = words
        return "go"

    @tool
    def work(self) -> str:
        "Do it."
        return "ok"

    def reward(self) -> float:
        return float(self.words == ["a"])


class Destroys(User):
    """Changes whatever it gets."""

    async def start(self, task, *, seed):
        task["words"].clear()
        task.clear()

    async def respond(self, messages):
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["name"] = "broken"
            message["content"] = "broken"
        messages.clear()
        return UserTurn("bye", done=True)


def choose(task):
    task["words"].append("b")
    return Destroys()


async def test_a_user_that_changes_what_it_gets_changes_no_record():
    spec = EnvSpec.of("test/Working-v0", Working, tasks=[{"words": ["a"]}], user=choose)
    script = lambda request: "done" if request.turn else tool_call("work")  # noqa: E731
    runner = Runner(
        ScriptedEngine(script, tokenizer=TOKENIZER), Renderer(TOKENIZER), options=RunnerOptions(concurrency=1)
    )

    (group,) = [group async for group in runner.run_groups(spec, [{"words": ["a"]}], 2)]

    for record in group:
        assert (record.stop_reason, record.reward) == (StopReason.USER_DONE, 1.0)
        assert record.task == {"words": ["a"]}
        told = [(message["role"], message["content"]) for message in record.messages]
        assert told == [
            ("user", "go"),
            ("assistant", ""),
            ("tool", "ok"),
            ("assistant", "done"),
            ("user", "bye"),
        ]
        assert record.messages[1]["tool_calls"][0]["function"]["name"] == "work"


async def test_one_environment_is_not_played_again_after_it_was_begun():
    def script(request):
        raise EngineUnavailable("down")

    runner = Runner(
        ScriptedEngine(script, tokenizer=TOKENIZER), Renderer(TOKENIZER), options=RunnerOptions(retries=3)
    )

    record = await runner.run_episode(Working(), {"words": []})

    assert (record.stop_reason, record.attempt, runner.ledger.retried) == (StopReason.ABORTED, 0, 0)
