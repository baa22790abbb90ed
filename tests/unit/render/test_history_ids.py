"""A template that knows results by their ids must not mix up two turns with the same ids."""

from __future__ import annotations

from agentenv.core import ToolCall
from agentenv.render import ChatTokenizer, Renderer
from helpers import chat_cases as cases

TEMPLATE = (
    "{% set seen = namespace(ids=[]) %}{% for m in messages %}"
    "{% if m.role != 'tool' or m.tool_call_id not in seen.ids %}<|im_start|>{{ m.role }} {{ loop.index }}\n"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ m.content }}<|im_end|>\n{% endif %}"
    "{% if m.role == 'tool' %}{% set seen.ids = seen.ids + [m.tool_call_id] %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_same_call_in_two_turns_gets_both_of_its_results() -> None:
    tokenizer = ChatTokenizer.load(cases.TOKENIZERS / "qwen3")
    renderer = Renderer(tokenizer, cases.TOOLS, chat_template=TEMPLATE)
    call = ToolCall("abc123456", "add", '{"n": 1}')
    turn = {"role": "assistant", "content": "", "tool_calls": [call.to_message()]}
    result = {"role": "tool", "tool_call_id": call.id, "name": "add", "content": "SUNNY"}
    history = [{"role": "user", "content": "u"}, turn, result]
    sampled = [tokenizer.token_id("<|im_end|>")]
    assert renderer.report.verdict == "history"

    appended = renderer.extend(sampled, [call], [result], history=history)

    assert "tool 5\nSUNNY<|im_end|>" in renderer.decode(appended)
