"""Only demonstrations that came out as they were meant are imitated."""

import pytest

from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import ChatTokenizer, Renderer
from agentenv.testing import tool_call_message
from agentenv.tools import tool
from agentenv.training.loop.sft import demonstrate, sort_out
from helpers import chat_cases
from helpers.call_formats import CALL_FORMATS

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

    assert (len(good), sum(others.values())) == (is_imitated, not is_imitated)
    assert is_imitated or "a call in the text was not run" in next(iter(others))


class Stock(Price):
    """Wants the price that a call returns, for the tool's arguments as they were meant."""

    def start(self, name: str) -> str:
        self.asked = ""
        return f"What does {name} cost?"

    @tool
    def look_up(self, name: str, codes: list[str]) -> int:
        """Return a price."""
        self.asked = f"{name} {codes}"
        return 3

    def reward(self, answer: str) -> float:
        return float(answer == "It costs 3." and self.asked == f"tea {CODES}")


CODES = ["007", 'a "b" <c>', "d\ne"]


def buy(messages, task, rng):
    """Call the tool, and then say what it returned."""
    if messages[-1]["role"] == "tool" or "tool_response" in str(messages[-1]["content"]):
        return "It costs 3."
    return tool_call_message("look_up", name=task["name"], codes=CODES)


FAMILIES = [*chat_cases.FAMILIES, "deepseek_v31", "dsml", "granite", "hermes", "kimi_k2", "minimax_m3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_oracle_of_every_family_earns_full_marks_and_is_imitated(family):
    own = family in chat_cases.FAMILIES
    tokenizer = (
        ChatTokenizer.load(chat_cases.TOKENIZERS / family)
        if own
        else chat_cases.tokenizer_for(CALL_FORMATS[family] + "{# <|im_end|> #}")
    )
    spec = EnvSpec.of("test/Stock-v0", Stock, tasks=[{"name": "tea"}])

    good, others = sort_out(demonstrate(spec, spec.task_set(), buy, Renderer(tokenizer)), min_reward=1)

    assert (len(good), others) == (1, {})
