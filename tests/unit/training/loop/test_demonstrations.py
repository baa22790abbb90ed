"""Only demonstrations that came out as they were meant are imitated."""

import pytest

from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import Renderer
from agentenv.tools import tool
from agentenv.training.loop.sft import demonstrate, sort_out
from helpers import chat_cases

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Word(ToolEnv):
    """Wants a word."""

    def start(self, word: str) -> str:
        return "Say it."

    def reward(self, answer: str) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("Done.", ""),
        ("<function=say></function>", "its calls [] was read as [('say', {})]"),
        ("Done. </parameter>", "malformed: </parameter> belongs to a call"),
    ],
)
def test_demonstrations_that_would_be_read_as_something_else_are_left_out(word, reason):
    renderer = Renderer(chat_cases.tokenizer_for(TEMPLATE), grammar="function_xml")
    spec = EnvSpec.of("test/Word-v0", Word, tasks=[{"word": word}])

    shown = demonstrate(spec, [{"word": word}], lambda messages, task, rng: task["word"], renderer)
    good, others = sort_out(shown)

    assert (len(good), len(others)) == (not reason, bool(reason))
    assert all(reason in other for other in others)


class Price(ToolEnv):
    """Wants a call."""

    def start(self, name: str) -> str:
        return f"What does {name} cost?"

    @tool
    def look_up(self, name: str) -> int:
        """Return a price."""
        return 3

    def reward(self, answer: str) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("said", "is_imitated"),
    [
        ('<tool_call>{"name": "look_up", "arguments": {"name": "tea"}}</tool_call>', False),
        ('I look. [TOOL_CALLS][{"name": "look_up", "arguments": {"name": "tea"}}]', False),
        ('```json\n{"name": "look_up", "arguments": {"name": "tea"}}\n```', False),
        ('look_up(name="tea")', False),
        ("With look_up I would find that tea costs 3.", True),
        ('{"name": "tea", "price": 3}', True),
        ('<tool_call>{"name": "buy", "arguments": {"name": "tea"}}</tool_call>', True),
    ],
)
def test_demonstrations_that_write_a_call_where_nothing_reads_it_are_left_out(said, is_imitated):
    renderer = Renderer(chat_cases.tokenizer_for(TEMPLATE), grammar="function_xml")
    spec = EnvSpec.of("test/Price-v0", Price, tasks=[{"name": "tea"}])

    good, others = sort_out(demonstrate(spec, spec.task_set(), lambda messages, task, rng: said, renderer))

    told = (
        {}
        if is_imitated
        else {"with a call of look_up in the text, which is not read (return it in tool_calls)": 1}
    )
    assert (len(good), others) == (is_imitated, told)
