"""A turn that no model samples is written as the template writes it, and earns what it is worth."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core import RenderError
from agentenv.engine.scripted.policy import PolicyEngine
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import ChatTokenizer, Renderer, byte_tokenizer
from agentenv.runner import Runner
from agentenv.testing import tool_call_message
from agentenv.tools import tool
from helpers import chat_cases as cases

TRL = cases.trl_templates()
NAMES = [*cases.FAMILIES, "bytes", *TRL]


def tokenizer_of(name: str) -> ChatTokenizer:
    if name == "bytes":
        return byte_tokenizer()
    return cases.tokenizer_for(TRL[name]) if name in TRL else ChatTokenizer.load(cases.TOKENIZERS / name)


class Till(ToolEnv):
    """A till that wants the price and then a word of thanks."""

    def start(self, price: int) -> str:
        self.paid = 0
        return f"Ring up {price}."

    @tool
    def ring(self, price: int, note: str) -> str:
        "Ring up a price with a note on the receipt."
        self.paid = price
        return "done"

    def reward(self, price: int, answer: str) -> float:
        return float(self.paid == price and answer.strip() == "Thanks.")

    @staticmethod
    def oracle(messages, task, rng):
        if messages[-1]["role"] == "tool":
            return "Thanks."
        return tool_call_message("ring", price=task["price"], note='a < b && "c"\nd')


async def played(name: str):
    renderer = Renderer(tokenizer_of(name))
    if renderer.report.verdict == "refused":
        pytest.skip("; ".join(renderer.report.reasons))
    engine = PolicyEngine(Till.oracle, renderer.tokenizer)
    runner = Runner(engine, renderer)
    spec = EnvSpec.of("test/Till-v0", Till, tasks=[{"price": 3}])
    return [each async for group in runner.run_groups(spec, [{"price": 3}]) for each in group]


@pytest.mark.parametrize("name", NAMES)
async def test_one_oracle_earns_full_marks_on_every_template(name):
    (episode,) = await played(name)

    assert (episode.error, episode.reward) == (None, 1.0)


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20))
@settings(max_examples=10, deadline=None)
def test_what_was_written_reads_back_or_is_refused(name, text):
    renderer = Renderer(tokenizer_of(name), cases.TOOLS)
    asked = tool_call_message("get_weather", city=text, n=2)

    try:
        read = renderer.parse(renderer.write(asked)).message
    except RenderError:
        return

    assert [json.loads(call["function"]["arguments"]) for call in read["tool_calls"]] == [
        {"city": text, "n": 2}
    ]


def test_a_refusal_shows_the_difference():
    renderer = Renderer(ChatTokenizer.load(cases.TOKENIZERS / "gptoss"), cases.TOOLS)
    asked = {**tool_call_message("get_weather", city="Oslo"), "content": "I look."}

    with pytest.raises(RenderError, match=r"its thinking '' was read as 'I look.'"):
        renderer.write(asked)


def test_text_that_a_template_drops_beside_a_call_is_written_before_the_call():
    renderer = Renderer(ChatTokenizer.load(cases.TOKENIZERS / "mistral_tekken"), cases.TOOLS)
    asked = {**tool_call_message("get_weather", city="Oslo"), "content": "I look."}

    written = renderer.write(asked)

    assert renderer.decode(written).startswith("I look.\n[TOOL_CALLS]")
    assert written[-1] in renderer.stop_token_ids


def test_control_strings_in_a_written_turn_stay_text():
    renderer = Renderer(ChatTokenizer.load(cases.TOKENIZERS / "qwen3"), cases.TOOLS)

    ids = renderer.write({"role": "assistant", "content": "say <|im_end|> twice"})

    assert ids.count(renderer.stop_token_ids[0]) == 1
    assert renderer.parse(ids).message["content"] == "say <|im_end|> twice"
