"""Parsers of vLLM and of the renderers package read our completions, under our rules."""

from __future__ import annotations

import importlib.util
import json

import pytest

from agentenv.core import CallStatus, DependencyMissing, UsageError
from agentenv.render import ChatTokenizer, Renderer
from helpers import chat_cases as cases

GOOD = '<tool_call>\n{"name": "add", "arguments": {"city": "P é", "n": 1}}\n</tool_call>'
pytestmark = pytest.mark.filterwarnings("default")
PACKAGES = {"vllm:hermes": "vllm", "renderers:qwen3": "renderers"}


def renderer_of(grammar: str) -> Renderer:
    package = PACKAGES[grammar]
    if importlib.util.find_spec(package) is None:
        how = ".ci/install-vllm DIR" if package == "vllm" else "pip install renderers httpx"
        pytest.skip(f"{package} is not installed: {how}")
    return Renderer(ChatTokenizer.load(cases.TOKENIZERS / "qwen3"), cases.TOOLS, grammar=grammar)


def read(renderer: Renderer, text: str, *, ended: bool = True):
    return renderer.parse(renderer.tokenizer.encode(text) + list(renderer.stop_token_ids[:1]) * ended)


@pytest.mark.engine
@pytest.mark.parametrize("grammar", PACKAGES)
def test_another_packages_parser_reads_calls_and_content(grammar: str) -> None:
    renderer = renderer_of(grammar)

    parsed = read(renderer, f"<think>\nhm\n</think>\n\nLet me see.\n{GOOD}\n{GOOD}")

    assert renderer.report.grammar == grammar
    assert parsed.message["reasoning_content"] == "hm"
    assert parsed.message["content"].strip() == "Let me see."
    assert [(call.name, call.status) for call in parsed.tool_calls] == [("add", CallStatus.OK)] * 2
    assert json.loads(parsed.tool_calls[0].arguments) == {"city": "P é", "n": 1}
    assert parsed.tool_calls[0].id != parsed.tool_calls[1].id
    assert read(renderer, GOOD).tool_calls == read(renderer, GOOD).tool_calls


@pytest.mark.engine
@pytest.mark.parametrize("grammar", PACKAGES)
def test_unclosed_cut_and_thought_calls_are_not_run_whatever_the_parser_says(grammar: str) -> None:
    renderer = renderer_of(grammar)
    unclosed = GOOD.removesuffix("</tool_call>")

    for text, ended in ((unclosed, True), (unclosed, False), (f"<think>\n{GOOD}\n</think>\n\nhi", True)):
        parsed = read(renderer, text, ended=ended)

        assert "tool_calls" not in parsed.message, text
        assert all(call.status is not CallStatus.OK for call in parsed.tool_calls)


@pytest.mark.engine
@pytest.mark.parametrize("grammar", PACKAGES)
@pytest.mark.parametrize(
    "inside", ['{"name": "sub", "arguments": {}}', '{"name": "add", "arguments": {"n"', ""]
)
def test_what_another_parser_cannot_read_never_raises_and_never_runs(grammar: str, inside: str) -> None:
    parsed = read(renderer_of(grammar), f"<tool_call>\n{inside}\n</tool_call>")

    names = [call["function"]["name"] for call in parsed.message.get("tool_calls", ())]
    assert set(names) <= {"sub"}  # a call of an unknown tool is well formed, so the message keeps it
    assert all(call.status is not CallStatus.OK for call in parsed.tool_calls)


@pytest.mark.engine
@pytest.mark.parametrize("grammar", PACKAGES)
def test_a_name_that_the_package_does_not_have_is_refused(grammar: str) -> None:
    tokenizer = renderer_of(grammar).tokenizer

    with pytest.raises(UsageError, match=grammar.partition(":")[2]):
        Renderer(tokenizer, grammar=grammar + "s")


@pytest.mark.parametrize("grammar", PACKAGES)
def test_a_package_that_is_missing_is_named_with_how_to_get_it(grammar: str) -> None:
    if importlib.util.find_spec(PACKAGES[grammar]) is not None:
        pytest.skip(f"{PACKAGES[grammar]} is installed")

    with pytest.raises(DependencyMissing, match="pip install"):
        Renderer(ChatTokenizer.load(cases.TOKENIZERS / "qwen3"), grammar=grammar)
