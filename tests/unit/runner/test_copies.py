"""What outside code gets is a copy: nothing that a user changes reaches the record or another episode."""

from __future__ import annotations

from agentenv.core import EngineUnavailable
from agentenv.envs import ToolEnv
from agentenv.runner import User, UserTurn
from agentenv.testing import tool_call
from agentenv.tools import tool
from scenes import groups_of, runner, spec_of


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
    spec = spec_of(Working, [{"words": ["a"]}], user=choose)

    (group,) = await groups_of(runner([tool_call("work"), "done"], concurrency=1), spec, group_size=2)

    for record in group:
        assert (record.stop_reason, record.reward) == ("user_done", 1.0)
        assert record.task == {"words": ["a"]}
        told = [message["content"] for message in record.messages]
        assert told == ["go", "", "ok", "done", "bye"]
        assert record.messages[1]["tool_calls"][0]["function"]["name"] == "work"


async def test_one_environment_is_not_played_again_after_it_was_begun():
    def script(request):
        raise EngineUnavailable("down")

    playing = runner(script, retries=3)

    record = await playing.run_episode(Working(), {"words": []})

    assert (record.stop_reason, record.attempt, playing.ledger.retried) == ("aborted", 0, 0)
