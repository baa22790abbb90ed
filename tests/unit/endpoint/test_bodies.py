"""Bodies that go on from earlier ones are read in part, and their values are those of the whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core import UsageError
from agentenv.core.serving import parse_json
from agentenv.endpoint import bodies as module
from agentenv.endpoint.bodies import Bodies

PATH = "/v1/chat/completions"
HI = {"role": "user", "content": 'say "messages": [1] \\ é\n'}


def written(messages, *, name="messages", before=None, after=None, **options):
    return json.dumps({**(before or {}), name: messages, **(after or {})}, **options).encode()


@pytest.fixture
def parsed(monkeypatch):
    """What the parser was given."""
    given: list[object] = []

    def note(text):
        given.append(text)
        return parse_json(text)

    monkeypatch.setattr(module, "parse_json", note)
    return given


@pytest.mark.parametrize("name", ["messages", "input"])
def test_the_beginning_of_a_conversation_is_not_read_again(name, parsed):
    bodies, after = Bodies(), {"tools": [{"name": "add"}], "stream": True}
    first = bodies.read(PATH, written([HI], name=name, after=after))
    messages = [HI, {"role": "assistant", "content": "x" * 5000}]
    second = bodies.read(PATH, written(messages, name=name, after=after))
    third = bodies.read(PATH, written([*messages, HI], name=name, after=after))

    assert first.value == {name: [HI], **after}
    assert third.value == {name: [*messages, HI], **after}
    assert third.value[name][0] is second.value[name][0] is first.value[name][0]
    assert first.converted is third.converted
    assert [len(text) < 500 for text in parsed] == [True], "only the frame of the first body was parsed"


@pytest.mark.parametrize(
    "text",
    [
        '{"metadata": {"messages": [1]}, "messages": [2, 3]}',
        '{"messages": [1], "messages": [2]}',
        '{"messages": [], "model": "m"}',
        '{"messages": "text", "input": [1]}',
        '{"a": "\\"messages\\": [", "messages": [1]}',
        '{"messages" :\n [ 1 , {"messages": [5]} ] , "x": null}',
        '{"model": "m"}',
        '{"messages": [1], "x": "\\ud83d\\ude00"}',
    ],
)
def test_the_value_is_that_of_the_whole_body(text):
    bodies = Bodies()

    for _ in range(3):
        assert bodies.read(PATH, text.encode()).value == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"messages": [1',
        '{"messages": [NaN]}',
        "[1]",
        '{"messages": ["\\ud800"]}',
        '{"messages": [1]} 2',
        "",
    ],
)
def test_what_is_no_json_object_is_refused(text):
    bodies = Bodies()
    bodies.read(PATH, b'{"messages": [1]}')

    with pytest.raises(UsageError):
        bodies.read(PATH, text.encode())


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(UsageError):
        Bodies().read(PATH, b'{"messages": ["\xff"]}')


def test_messages_that_are_nested_too_deeply_are_refused():
    bodies = Bodies()
    bodies.read(PATH, b'{"messages": [1]}')

    with pytest.raises(UsageError, match="nested deeper"):
        bodies.read(PATH, b'{"messages": [1, ' + b"[" * 200 + b"]" * 200 + b"]}")


def test_a_message_that_goes_on_is_another_message():
    bodies = Bodies()
    bodies.read(PATH, b'{"messages": [12]}')

    assert bodies.read(PATH, b'{"messages": [123]}').value == {"messages": [123]}


def test_few_conversations_are_kept():
    bodies = Bodies()
    for number in range(20):
        bodies.read(PATH, written([number, "x"]))

    assert len(bodies._reads) == Bodies.KEPT


VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["messages", "a"]), inner),
    max_leaves=4,
)
FRAMES = st.dictionaries(st.sampled_from(["model", "metadata", "input", "tools"]), VALUES, max_size=2)


@given(
    conversations=st.lists(st.lists(VALUES, max_size=6), min_size=1, max_size=2),
    before=FRAMES,
    after=FRAMES,
    steps=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 6)), max_size=8),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_any_bodies_in_any_order(conversations, before, after, steps, ascii_only, indent):
    bodies, digests = Bodies(), {}
    for which, size in steps:
        messages = conversations[which % len(conversations)][:size]
        try:
            text = written(messages, before=before, after=after, ensure_ascii=ascii_only, indent=indent)
        except UnicodeEncodeError:
            return
        try:
            whole = parse_json(text)
        except UsageError:
            return
        body = bodies.read(PATH, text)
        assert body.value == whole
        assert digests.setdefault(body.digest, text) == text
        assert body.digest == Bodies().read(PATH, text).digest != bodies.read("/v1/messages", text).digest
