"""Only demonstrations that came out as they were meant are imitated."""

import pytest

from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import Renderer
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
