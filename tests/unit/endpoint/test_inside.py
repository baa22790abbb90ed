"""Fields inside of a request: those of messages, of their parts, and of tools."""

from __future__ import annotations

import re
from typing import get_args, get_type_hints

import pytest

from agentenv.endpoint.wire.fields import ITEM, MESSAGE, PART, TOOL
from helpers.agents import ASK, CHAT, MESSAGES, RESPONSES, by_turn, served
from unit.endpoint.test_fields import DOCS

TEXT = {"type": "text", "text": "hi"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}
FUNCTION = {"name": "add", "strict": True, "parameters": {"type": "object", "properties": {}}}
RESULT = {"type": "tool_result", "tool_use_id": "x", "content": "no", "is_error": True}
THOUGHT = {"type": "redacted_thinking", "data": "x"}
REASONING = {"type": "reasoning", "summary": [], "encrypted_content": "x"}


def of_user(*parts):
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("path", "body", "counted"),
    [
        (CHAT, {"messages": [{**ASK, "name": "bob"}]}, "message_name"),
        (CHAT, {"messages": of_user({**TEXT, "strange": 1})}, "unknown_field"),
        (CHAT, {"messages": [ASK], "tools": [{"type": "function", "function": FUNCTION}]}, "tool_strict"),
        (RESPONSES, {"input": [ASK, REASONING, ASK]}, "item_encrypted_content"),
        (RESPONSES, {"input": [ASK], "tools": [{"type": "function", **FUNCTION}]}, "tool_strict"),
        (
            RESPONSES,
            {"input": [ASK], "tools": [{"type": "namespace", "tools": [{"type": "function", **FUNCTION}]}]},
            "tool_strict",
        ),
        (MESSAGES, {"messages": of_user(RESULT)}, "part_is_error"),
        (MESSAGES, {"messages": [ASK, {"role": "assistant", "content": [THOUGHT, TEXT]}, ASK]}, "part_data"),
        (
            MESSAGES,
            {"messages": [ASK], "tools": [{"name": "add", "input_schema": {}, "defer_loading": True}]},
            "tool_defer_loading",
        ),
    ],
)
async def test_what_is_not_followed_inside_a_request_is_counted(path, body, counted):
    async with served(["ok"]) as agent:
        await agent.post(path, {"max_tokens": 50, **body} if path == MESSAGES else body)

        assert agent.ignored == {f"ignored_{counted}"}


async def test_a_message_is_counted_once_though_every_request_repeats_it():
    history = [{**ASK, "name": "bob"}]
    async with served(by_turn("ok")) as agent:
        for _ in range(3):
            history += [await agent.chat(history, tools=()), ASK]

        assert agent.session.counts["ignored_message_name"] == 1


@pytest.mark.parametrize(
    "part",
    [
        {**TEXT, "cache_control": {"type": "ephemeral"}},
        {**TEXT, "annotations": [1]},
        {**TEXT, "citations": None},
    ],
)
async def test_what_asks_nothing_of_the_model_is_not_counted(part):
    async with served(["ok"]) as agent:
        await agent.post(CHAT, {"messages": of_user(part)})

        assert agent.ignored == set()


BAD = [
    (CHAT, {"messages": [{"role": "critic", "content": "hi"}]}, "critic"),
    (CHAT, {"messages": [{"role": "function", "name": "x", "content": "3"}]}, "'function'"),
    (CHAT, {"messages": [ASK, {"role": "assistant", "function_call": {"name": "x"}}, ASK]}, "function_call"),
    (CHAT, {"messages": [{"role": "user", "content": {"a": 1}}]}, "content is"),
    (CHAT, {"messages": "hi"}, "messages is 'hi'"),
    (CHAT, {"messages": [ASK], "stop": 5}, "stop is 5"),
    (CHAT, {"messages": [ASK], "stop": ["a", 5]}, "list of texts"),
    (CHAT, {"messages": [ASK], "stream": "false"}, "true or false"),
    (CHAT, {"messages": [ASK], "stream": True, "stream_options": 5}, "stream_options"),
    (CHAT, {"messages": [ASK], "parallel_tool_calls": "false"}, "true or false"),
    (CHAT, {"messages": [ASK], "tools": [{"type": "function", "function": {"name": "x", "parameters": "s"}}]}, "'s'"),
    (CHAT, {"messages": [ASK], "continue_final_message": True}, "continue_final_message"),
    (CHAT, {"messages": [ASK], "add_generation_prompt": False}, "add_generation_prompt"),
    (
        CHAT,
        {"messages": [ASK, {"role": "assistant", "content": "It"}], "continue_final_message": False},
        "continue_final_message",
    ),
    (RESPONSES, {"input": [ASK], "instructions": {"a": 1}}, "instructions"),
    (RESPONSES, {"input": [{"role": "tool", "content": "x"}]}, "'tool'"),
    (MESSAGES, {"messages": [ASK], "stop_sequences": "abc"}, "stop_sequences"),
    (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}, "'tool'"),
    (MESSAGES, {"messages": [ASK], "system": {"a": 1}}, "content is"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "told"), BAD)
async def test_what_would_be_misread_is_refused(path, body, told):
    async with served(["ok"]) as agent:
        said = await agent.post(path, {"max_tokens": 50, **body} if path == MESSAGES else body, 400)

        assert told in said["error"]["message"]
        assert agent.engine.requests == []


async def test_arguments_that_are_an_object_are_read_as_json():
    asked = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    history = [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "1"},
    ]
    async with served(["ok"]) as agent:
        await agent.chat(history)

        assert '"arguments": {"a": 1}' in agent.engine.requests[0].prompt_text
        assert agent.ignored == set()


def test_the_page_has_the_tables():
    text = DOCS.read_text()
    rows = {
        heading: dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", part, re.MULTILINE))
        for heading, part in re.findall(r"^### ([^\n]+)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    }

    for heading, table in {"Messages": MESSAGE, "Items": ITEM, "Parts": PART, "Tools": TOOL}.items():
        assert rows[heading] == dict(table)


# Against the SDKs' own types ------------------------------------------------------------------


def kinds_in(annotation, found=None):
    """The typed dictionaries that a type may be, each with its fields, by the values of its `type`."""
    from typing_extensions import is_typeddict

    found = {} if found is None else found
    if is_typeddict(annotation):
        fields = get_type_hints(annotation)
        for kind in literals(fields.get("type")) or {""}:
            found.setdefault(kind, set()).update(fields)
        return found
    for inner in get_args(getattr(annotation, "__value__", annotation)):
        kinds_in(inner, found)
    return found


def literals(annotation):
    args = get_args(annotation)
    texts = {value for value in args if isinstance(value, str)}
    return texts.union(*(literals(inner) for inner in args if not isinstance(inner, str)))


def sdk(module, name="MessageCreateParamsBase"):
    import importlib

    return get_type_hints(getattr(importlib.import_module(module), name))


CHAT_TYPES = ("openai.types.chat.completion_create_params", "CompletionCreateParamsBase")
RESPONSES_TYPES = ("openai.types.responses.response_create_params", "ResponseCreateParamsBase")
SERVED_ITEMS = {"message", "function_call", "function_call_output", "reasoning", "item_reference", ""}
SERVED_PARTS = {"text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"}


@pytest.mark.slow
def test_the_tables_have_the_fields_of_chat_completions():
    pytest.importorskip("openai")
    fields = sdk(*CHAT_TYPES)
    messages = set().union(*kinds_in(fields["messages"]).values())
    tools = kinds_in(fields["tools"])

    assert messages - {"audio", "function_call"} <= set(MESSAGE)
    assert set(tools) == {"function", "custom"}, "each is served, or refused by its type"
    parts = kinds_in(
        get_type_hints(sdk_type("openai.types.chat", "ChatCompletionUserMessageParam"))["content"]
    )
    assert parts["text"] | parts["image_url"] <= set(PART)


def sdk_type(module, name):
    import importlib

    return getattr(importlib.import_module(module), name)


@pytest.mark.slow
async def test_every_item_of_responses_is_served_with_all_its_fields_or_refused():
    pytest.importorskip("openai")
    fields = sdk(*RESPONSES_TYPES)
    async with served(["ok"]) as agent:
        for kind, names in kinds_in(fields["input"]).items():
            if kind in SERVED_ITEMS:
                assert names <= set(MESSAGE) | set(ITEM), kind
            else:
                said = await agent.post(RESPONSES, {"input": [ASK, {"type": kind, "id": "x"}]}, 400)
                assert kind in said["error"]["message"]
    assert kinds_in(fields["tools"])["function"] <= set(TOOL)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["message_create_params", "beta.message_create_params"])
async def test_every_block_of_anthropics_is_served_with_all_its_fields_or_refused(module):
    pytest.importorskip("anthropic")
    fields = sdk(f"anthropic.types.{module}")
    messages = kinds_in(fields["messages"])[""]
    beta = "Beta" if "beta" in module else ""
    said = sdk_type(f"anthropic.types{'.beta' if beta else ''}", f"{beta}MessageParam")
    blocks = {}
    for message in get_args(said) or (said,):
        kinds_in(get_type_hints(message)["content"], blocks)

    assert messages <= set(MESSAGE)
    assert set(blocks) >= SERVED_PARTS
    async with served(["ok"]) as agent:
        for kind, names in blocks.items():
            if kind in SERVED_PARTS:
                assert names <= set(PART), kind
                continue
            for role in ("user", "assistant"):
                content = [{"type": kind, "id": "x", "name": "y", "input": {}, "content": []}]
                body = {"messages": [ASK, {"role": role, "content": content}, ASK], "max_tokens": 9}
                told = (await agent.post(MESSAGES, body, 400))["error"]["message"]
                assert kind in told
    tools = kinds_in(fields["tools"])
    own = {kind: names for kind, names in tools.items() if kind in ("custom", "") or "text_editor" in kind}
    assert own
    for kind, names in own.items():
        assert names <= set(TOOL), kind
