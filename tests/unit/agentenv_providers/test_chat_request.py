"""What a request to a chat API costs, which sends the whole conversation in every turn."""

from __future__ import annotations

from agentenv_providers.openai.refusal import features_of
from agentenv_providers.openai.reply import whole_reply
from agentenv_providers.openai.request import messages_for
from helpers.costs import lines_counted


def test_a_message_that_is_sent_again_is_not_read_again():
    function = {"name": "look", "arguments": '{"page": 1}'}
    said = {
        "content": None,
        "refusal": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    answer = whole_reply({"message": said, "finish_reason": "tool_calls"}, "api").message
    messages = [answer, {"role": "tool", "tool_call_id": "1", "content": "the quick brown fox"}] * 50

    with lines_counted() as costs:
        sent = messages_for(messages, "api", frozenset())
        features_of({"messages": sent})

    assert sent[0]["content"] is None
    assert costs.lines < 70 * len(messages)
