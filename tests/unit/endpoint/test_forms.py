"""Requests that say what a reply must be, answered by a model of random weights that would never do so."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from agentenv.core.messages import CallStatus
from agentenv.engine import Features, Sampling, ScriptedEngine
from agentenv.engine.interface import ChatCompletion, Usage
from agentenv.render import Renderer, byte_tokenizer
from agentenv.render.protocol import ReplyForm
from agentenv.render.reply_grammar import CALL_FORMS
from agentenv.render.tokenizer import ChatTokenizer
from helpers.agents import ADD, ASK, CHAT, MESSAGES, RESPONSES, body_of, call, served, tools_of

COLOURS = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "layers": {"type": "integer", "maximum": 9}},
    "required": ["colour"],
}
PAINT, MIX = (
    {"type": "function", "function": {"name": name, "parameters": COLOURS}} for name in ("paint", "mix")
)
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 99}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


def without_thinking() -> ChatTokenizer:
    """The byte tokenizer without tags for thinking, with which random weights would never end."""
    tokenizer = byte_tokenizer()
    state = json.loads(tokenizer.backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if "think>" not in token["content"]]
    return ChatTokenizer(
        Tokenizer.from_str(json.dumps(state)),
        chat_template=tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens,
    )


TOKENIZER = without_thinking()
END = TOKENIZER.token_id("<|im_end|>")


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("llguidance", reason="needs the grammar extra")
    pytest.importorskip("torch")
    from unit.engine.hf.test_engine import build

    return build()


@asynccontextmanager
async def random_weights(model, renderer=None, **options):
    """Serve a session of a model of random weights."""
    from agentenv.engine import TransformersEngine

    engine = TransformersEngine(model, TOKENIZER)
    options = {"sampling": Sampling(max_tokens=3000), "seed_of": lambda number: number, **options}
    async with served(engine=engine, renderer=renderer or Renderer(TOKENIZER), **options) as agent:
        yield agent
    await engine.close()


async def calls_of(agent, path, choice, **more):
    """The names and arguments of the calls with which a model answers."""
    body = body_of(path, ASK, tools=[PAINT, MIX], tool_choice=choice, **more)
    said = await agent.post(path, body | ({"max_tokens": 3000} if path == MESSAGES else {}))
    if path == CHAT:
        made = [one["function"] for one in said["choices"][0]["message"]["tool_calls"]]
        return [(one["name"], json.loads(one["arguments"])) for one in made]
    if path == RESPONSES:
        assert {item["type"] for item in said["output"]} == {"function_call"}
        return [(item["name"], json.loads(item["arguments"])) for item in said["output"]]
    assert {block["type"] for block in said["content"]} == {"tool_use"}
    return [(block["name"], block["input"]) for block in said["content"]]


@pytest.mark.parametrize(
    ("path", "choice"), [(CHAT, "required"), (RESPONSES, "required"), (MESSAGES, {"type": "any"})]
)
async def test_a_required_call_is_always_made_and_can_be_read(model, path, choice):
    names = set()
    async with random_weights(model) as agent:
        for _ in range(8):
            calls = await calls_of(agent, path, choice)
            for name, arguments in calls:
                assert arguments["colour"] in {"red", "blue"}
                assert arguments.get("layers", 9) <= 9
                names.add(name)

        turns = agent.captured.turns
        assert {call.status for turn in turns for call in turn.tool_calls} == {CallStatus.OK}
        assert {turn.finish_reason for turn in turns} == {"stop"}
        assert not agent.session.counts["calls_against_tool_choice"]
    assert names == {"paint", "mix"}


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        (CHAT, {"type": "function", "function": {"name": "mix"}}),
        (RESPONSES, {"type": "function", "name": "mix"}),
        (RESPONSES, {"type": "allowed_tools", "mode": "required", "tools": tools_of(RESPONSES, MIX)}),
        (MESSAGES, {"type": "tool", "name": "mix"}),
    ],
)
async def test_a_named_tool_is_the_one_that_is_called(model, path, choice):
    async with random_weights(model) as agent:
        for _ in range(4):
            (called,) = await calls_of(agent, path, choice, parallel_tool_calls=False)
            assert called[0] == "mix"


async def test_without_parallel_calls_there_is_one_and_nothing_is_cut_off(model):
    async with random_weights(model) as agent:
        for _ in range(8):
            assert len(await calls_of(agent, CHAT, "required", parallel_tool_calls=False)) == 1
            choice = {"type": "any", "disable_parallel_tool_use": True}
            assert len(await calls_of(agent, MESSAGES, choice)) == 1

        assert not agent.session.counts["calls_against_parallel_tool_calls"]


def format_of(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


FORMAT = {"type": "json_schema", "name": "a", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, format_of(SCHEMA)),
        (RESPONSES, {"text": {"format": FORMAT}}),
        (MESSAGES, {"output_config": {"format": FORMAT}}),
        (MESSAGES, {"output_format": FORMAT}),
    ],
)
async def test_a_schema_always_gives_json_of_that_schema(model, path, asked):
    async with random_weights(model) as agent:
        for _ in range(6):
            said = await agent.post(path, body_of(path, ASK, **asked))
            parts = said.get("content") or said.get("output", [{}])[0].get("content")
            value = json.loads(parts[0]["text"] if parts else said["choices"][0]["message"]["content"])
            assert set(value) == {"answer", "sure"}
            assert 0 <= value["answer"] <= 99
            assert isinstance(value["sure"], bool)

        assert agent.ignored == set()


async def test_with_a_schema_and_tools_a_reply_is_calls_or_json(model):
    kinds = set()
    async with random_weights(model) as agent:
        for _ in range(12):
            said = await agent.chat([ASK], tools=[PAINT], **format_of(SCHEMA))
            kinds.add("calls" if said.get("tool_calls") else "json")
            assert said.get("tool_calls") or set(json.loads(said["content"])) == {"answer", "sure"}
    assert kinds == {"calls", "json"}


@pytest.mark.parametrize("name", CALL_FORMS)
async def test_calls_of_every_format_can_be_read_again(model, name):
    from agentenv.engine import TransformersEngine

    engine = TransformersEngine(model, TOKENIZER)
    renderer = Renderer(TOKENIZER, [PAINT, MIX], grammar=name)
    grammar = renderer.grammar(ReplyForm(calls=("paint", "mix")))
    asked = Sampling(grammar=grammar, max_tokens=800)
    done = await asyncio.gather(
        *(engine.generate([1, 2], replace(asked, seed=seed), stop_token_ids=(END,)) for seed in range(8))
    )
    await engine.close()
    turns = [renderer.parse(one.token_ids) for one in done if one.finish_reason == "stop"]
    assert turns
    for turn in turns:
        assert turn.tool_calls
        assert {call.status for call in turn.tool_calls} == {CallStatus.OK}
        assert not turn.message["content"]


async def test_a_constrained_reply_is_trained_on_its_supports_if_top_k_bounds_them(model):
    kept = Sampling(max_tokens=3000, top_k=20, keep_support=True)
    async with random_weights(model, sampling=kept) as agent:
        await calls_of(agent, CHAT, "required")

        captured = agent.captured
    (sequence,), (turn,) = captured.sequences, captured.turns
    assert captured.untrainable_reason == ""
    assert [index for index, trained in enumerate(sequence.loss_mask) if trained] == [
        *range(turn.start, turn.end)
    ]
    supports = sequence.supports_of(turn.start, turn.end)
    assert supports is not None
    assert supports[0] == (TOKENIZER.token_id("<tool_call>"),)
    assert max(supports.lengths) <= 20


@pytest.mark.parametrize("keep", [True, False])
async def test_without_top_k_a_constrained_reply_is_left_out_and_the_others_are_trained(model, keep):
    settings = Sampling(max_tokens=400, keep_support=keep)
    async with random_weights(model, sampling=settings, choice="all") as agent:
        await agent.chat([ASK], tools=[PAINT])
        (name, _), *_ = await calls_of(agent, CHAT, "required", parallel_tool_calls=False)

        captured = agent.captured
        trained = [sum(sequence.loss_mask) for sequence in captured.sequences]
    assert name in {"paint", "mix"}
    assert trained == [captured.turns[0].num_tokens, 0]
    assert captured.left_out == {"constrained": captured.turns[1].num_tokens}
    assert captured.untrainable_reason == ""


async def test_a_model_thinks_before_a_reply_if_its_template_begins_the_thinking():
    opened = "<|im_start|>assistant\\n<think>\\n' -}}"
    template = byte_tokenizer().chat_template.replace("<|im_start|>assistant\\n' -}}", opened)
    renderer = Renderer(byte_tokenizer(), [PAINT], chat_template=template)
    opens, closes = (byte_tokenizer().token_id(tag) for tag in ("<think>", "</think>"))

    begun = renderer.grammar(ReplyForm(calls=("paint",)))
    free = Renderer(byte_tokenizer(), [PAINT]).grammar(ReplyForm(calls=("paint",)))

    assert begun.startswith(f"start: /(.|\\n)*/ <[{closes}]>")
    assert free.startswith(f"start: (<[{opens}]> /(.|\\n)*/ <[{closes}]>")


class Plain(ScriptedEngine):
    """A scripted engine that cannot sample by a grammar."""

    features = Features()


async def test_an_engine_that_cannot_follow_answers_as_it_likes_which_is_counted():
    async with served(engine=Plain(["ok", "ok"], tokenizer=TOKENIZER, name="plain"), name="s") as agent:
        said = await agent.chat([ASK], tool_choice="required")
        await agent.chat([ASK], tools=(), **format_of(SCHEMA))

    assert said["content"] == "ok"
    assert agent.session.counts["ignored_tool_choice"] == 1
    assert agent.session.counts["ignored_output_format"] == 1


async def test_a_format_of_calls_without_a_grammar_is_refused_by_its_name(model):
    async with random_weights(model, Renderer(TOKENIZER, grammar="glm")) as agent:
        refused = await agent.chat([ASK], tool_choice="required", status=400)
        said = await agent.chat([ASK], tools=(), **format_of(SCHEMA))

    assert "'glm'" in refused["message"]
    assert set(json.loads(said["content"])) == {"answer", "sure"}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "'sub'"),
        ({"tool_choice": "required", "tools": []}, "no such tool"),
        ({"tool_choice": {"type": "web_search"}}, "web_search"),
        ({"response_format": {"type": "json_schema"}}, "no schema"),
        ({"response_format": {"type": "grammar"}}, "'grammar'"),
    ],
    ids=str,
)
async def test_what_cannot_be_asked_of_a_reply_is_refused(body, told):
    async with served(["ok"]) as agent:
        refused = await agent.post(CHAT, {"messages": [ASK], "tools": [ADD], **body}, 400)

        assert told in refused["error"]["message"]
        assert agent.engine.requests == []


async def test_a_schema_that_no_grammar_can_express_is_refused(model):
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "string"}}
    async with random_weights(model) as agent:
        refused = await agent.chat([ASK], tools=(), status=400, **format_of(schema))

    assert "uniqueItems" in refused["message"]


async def test_a_reply_that_is_begun_has_no_form():
    async with served(["ok"]) as agent:
        begun = [ASK, {"role": "assistant", "content": "It"}]

        assert "begun" in (await agent.chat(begun, tool_choice="required", status=400))["message"]


async def test_a_script_that_makes_no_call_is_counted():
    for script, missing in (("no", 1), (call('{"a": 1, "b": 2}'), 0)):
        async with served([script]) as agent:
            await agent.chat([ASK], tool_choice="required")

            assert agent.session.counts["calls_against_tool_choice"] == missing
            assert agent.engine.requests[0].sampling.grammar


@pytest.mark.parametrize(
    ("script", "missed"),
    [("It is 5.", 1), ("[5]", 1), ('{"answer": 5}', 1), ('{"answer": 5, "sure": true}', 0), (call("{}"), 0)],
)
async def test_a_script_whose_text_has_not_the_output_format_is_counted(script, missed):
    async with served([script], name="s") as agent:
        await agent.post(RESPONSES, {"input": [ASK], "tools": [], "text": {"format": FORMAT}})

        assert agent.session.counts["ignored_output_format"] == missed


class Asks:
    """A chat engine that is told the form, and whose API does not care."""

    name, max_context_tokens, features = "asks", None, Features(forms=True)

    def __init__(self, *replies: str) -> None:
        self.replies, self.forms = list(replies), []

    async def chat(self, messages, tools, sampling, *, deadline_s=None, form=None):
        self.forms.append(form)
        return ChatCompletion({"role": "assistant", "content": self.replies.pop(0)}, Usage(), "stop")

    async def close(self) -> None: ...


async def test_a_chat_engine_is_told_the_form_and_its_reply_is_looked_at():
    engine = Asks("ok", "ok", '{"answer": 1, "sure": true}', "ok")
    async with served(engine=engine, renderer=None) as agent:
        await agent.chat([ASK], tools=[PAINT, MIX], tool_choice="required")
        await agent.chat([ASK], tools=(), **format_of(SCHEMA))
        await agent.chat([ASK], tools=(), **format_of(SCHEMA))
        await agent.chat([ASK], tools=[PAINT])

    must, json_form = ReplyForm(calls=("paint", "mix")), ReplyForm(schema=SCHEMA)
    assert engine.forms == [must, json_form, json_form, None]
    assert agent.session.counts["calls_against_tool_choice"] == 1
    assert agent.session.counts["ignored_output_format"] == 1
    assert agent.session.counts["ignored_tool_choice"] == 0
