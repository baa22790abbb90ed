"""Scripted tool calls are read back as the calls that they are."""

from __future__ import annotations

import json

import agentenv as ae
import scenes
from agentenv.testing import play, tool_call, tool_call_message


class Names(ae.ToolEnv):
    def start(self) -> str:
        self.heard: list[str] = []
        return "Name them."

    @ae.tool(parallel=False)
    def name(self, name: str) -> str:
        """Take a name."""
        self.heard.append(name)
        return "taken"

    def reward(self) -> float:
        return float(len(self.heard))


async def test_scripted_models_and_policies_call_tools():
    def policy(messages, task, rng):
        return "done" if messages[-1]["role"] == "tool" else tool_call_message("name", name="é")

    env = Names()
    turn = tool_call("name", name="é") + tool_call("name", name='"</tool')
    record = await scenes.play(env, [turn, "done"])
    played = await play(Names(), policy, {})

    assert (env.heard, record.reward) == (["é", '"</tool'], 2.0)
    assert (played.tool_results[0].text, played.reward) == ("taken", 1.0)


def test_text_and_message_say_the_same():
    call = tool_call_message("f", a=[1, None], b={"c": "d"})["tool_calls"][0]["function"]

    assert tool_call("f", a=[1, None], b={"c": "d"}) == (
        f'<tool_call>{{"name": "f", "arguments": {call["arguments"]}}}</tool_call>'
    )
    assert json.loads(call["arguments"]) == {"a": [1, None], "b": {"c": "d"}}
