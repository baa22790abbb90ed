"""A first prompt that is remembered is the one that would be rendered."""

from __future__ import annotations

import pytest

from agentenv.core import RenderError
from agentenv.render import ChatTokenizer, Renderer, TextProtocol, byte_tokenizer
from agentenv.render import template as openings_module
from helpers import chat_cases as cases

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "hi <|im_end|>"}
PROMPTS = [
    [ASK],
    [SYSTEM, ASK],
    [{"role": "user", "content": "Be brief."}, {"role": "system", "content": "hi <|im_end|>"}],
    [{"role": "user", "content": "Be brief.hi <|im_end|>"}],
    [ASK, {"role": "assistant", "content": "w"}, ASK],
]
NARROW = byte_tokenizer().chat_template


def counted(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that grows with each prompt that is rendered."""
    rendered: list[object] = []
    plain = Renderer._opening
    monkeypatch.setattr(
        Renderer, "_opening", lambda self, messages: rendered.append(messages) or plain(self, messages)
    )
    return rendered


@pytest.mark.parametrize("family", ["bytes", *cases.FAMILIES])
def test_remembered_prompts_equal_fresh_ones_with_any_tools(family: str) -> None:
    tokenizer = byte_tokenizer() if family == "bytes" else ChatTokenizer.load(cases.TOKENIZERS / family)
    shared = Renderer(tokenizer)
    seen = {}
    for tools in (cases.TOOLS, cases.TOOLS[:1], []):
        for _ in range(2):
            for index, messages in enumerate(PROMPTS):
                fresh = Renderer(tokenizer, tools)
                try:
                    expected = fresh._start(messages)
                except RenderError:
                    with pytest.raises(RenderError):
                        shared.bind(tools).start(messages)
                    continue
                assert shared.bind(list(tools)).start([dict(message) for message in messages]) == expected
                seen[len(tools), index] = expected
    assert len(seen) >= 9


def test_a_group_renders_its_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer(byte_tokenizer())
    rendered = counted(renderer, monkeypatch)

    first = renderer.bind(cases.TOOLS).start([ASK])
    first.append(7)
    again = renderer.bind(list(cases.TOOLS)).start([dict(ASK)])

    assert len(rendered) == 1
    assert again == first[:-1]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": "user", "content": "hi", "name": "n"}],
        [{"role": "assistant", "content": "", "tool_calls": []}, ASK],
    ],
)
def test_messages_with_more_than_a_text_are_rendered_each_time(messages, monkeypatch) -> None:
    renderer = Renderer(byte_tokenizer())
    rendered = counted(renderer, monkeypatch)

    assert renderer.start(messages) == renderer.start(messages)
    assert len(rendered) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"chat_template": "{{- strftime_now('%Y') -}}" + NARROW},
        {"chat_template": "{{- ['a', 'b'] | random -}}" + NARROW},
        {"template_kwargs": {"stamp": list}},
        {"protocol": TextProtocol(describe=lambda tools: "tools")},
    ],
    ids=["time", "chance", "function", "protocol"],
)
def test_what_may_write_something_else_is_rendered_each_time(options, monkeypatch) -> None:
    renderer = Renderer(byte_tokenizer(), **options)
    rendered = counted(renderer, monkeypatch)

    renderer.start([ASK])
    renderer.start([ASK])

    assert len(rendered) == 2


def test_only_so_many_tokens_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openings_module, "MAX_TOKENS", 200)
    renderer = Renderer(byte_tokenizer())
    kept = renderer._openings
    for length in (10, 60, 90, 500, 20):
        renderer.start([{"role": "user", "content": "x" * length}])
        assert kept._size == sum(map(len, kept._known.values())) <= 200

    assert 1 <= len(kept._known) < 4
