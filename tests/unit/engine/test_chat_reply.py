"""Replies of a chat API that no model means."""

from __future__ import annotations

from agentenv.engine.chat_reply import MAX_CALLS, whole_reply

CALL = {"id": "", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def reply(**message):
    return whole_reply({"message": {"role": "assistant", **message}, "finish_reason": "stop"}, "api")


def test_a_reply_with_more_calls_than_anybody_means_is_malformed():
    most, more = (reply(content="So.", tool_calls=[CALL] * n) for n in (MAX_CALLS, MAX_CALLS + 1))

    assert (len(most.message["tool_calls"]), most.malformed) == (MAX_CALLS, False)
    assert more.malformed
    assert more.message == {"role": "assistant", "content": "So."}
