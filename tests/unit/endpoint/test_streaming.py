"""Answers are streamed as they are sampled, and are the same as those in one piece."""

from __future__ import annotations

import asyncio
import json
from random import Random

import aiohttp
import pytest

from agentenv.core import EngineError
from agentenv.endpoint import Session, SessionOptions, serve_sessions
from agentenv.engine import Completion, Sampling, ScriptedEngine
from agentenv.render import Renderer, byte_tokenizer
from helpers.agents import (
    ADD,
    ASK,
    CHAT,
    MESSAGES,
    RENDERER,
    RESPONSES,
    TOKENIZER,
    body_of,
    by_turn,
    call,
    check_tokens,
    served,
)
from helpers.waiting import until

CALL = call('{"a": 2, "b": 3}')
THINKING = "<think>I should\n  add.  </think> Let me look. \n" + CALL


class Dripping(ScriptedEngine):
    """Samples a token only when the test lets it, up to `free` tokens."""

    def __init__(self, script, free=0):
        super().__init__(script, tokenizer=TOKENIZER)
        self.free = free
        self.told = 0
        self.fails_at = -1
        self.wrong = False

    async def stream(self, prompt_ids, sampling, on_tokens, **request):
        done = await self.generate(prompt_ids, sampling, **request)
        for index, token in enumerate(done.token_ids):
            await until(lambda index=index: index < self.free)
            if index == self.fails_at:
                raise EngineError("the model broke")
            on_tokens((token,))
            self.told = index + 1
        if self.wrong:
            ids = (*TOKENIZER.encode("Other"), done.token_ids[-1])
            return Completion(ids, (-0.5,) * len(ids), "stop")
        return done


class Client:
    """Reads the events of a stream as they come, over one of the wire formats."""

    def __init__(self, agent, path):
        self.agent, self.path = agent, path
        self.parts = {"thinking": "", "text": "", "calls": ""}
        self.events = []
        self.ended = False

    async def ask(self, status=200, **more):
        body = body_of(self.path, ASK, tools=[ADD], stream=True, **more)
        async with self.agent.http.post(self.agent.url + self.path, json=body) as got:
            assert got.status == status, await got.text()
            if status != 200:
                return await got.json()
            async for line in got.content:
                name, _, value = line.decode().strip().partition(": ")
                if name == "data":
                    self.read(value)
        self.ended = True
        return None

    def read(self, value):
        if value == "[DONE]":
            self.events.append(value)
            return
        event = json.loads(value)
        self.events.append(event)
        if self.path == CHAT:
            delta = event["choices"][0]["delta"] if event.get("choices") else {}
            self.parts["thinking"] += delta.get("reasoning_content") or ""
            self.parts["text"] += delta.get("content") or ""
            for made in delta.get("tool_calls", ()):
                self.parts["calls"] += made["function"]["arguments"]
        elif self.path == MESSAGES:
            delta = event.get("delta", {})
            self.parts["thinking"] += delta.get("thinking", "")
            self.parts["text"] += delta.get("text", "")
            self.parts["calls"] += delta.get("partial_json", "")
        else:
            kinds = {"reasoning_text": "thinking", "output_text": "text", "function_call_arguments": "calls"}
            _, _, rest = event["type"].partition(".")
            kind, _, what = rest.rpartition(".")
            if what == "delta":
                self.parts[kinds[kind]] += event["delta"]


def dripping(script, free=0, **options):
    return served(engine=Dripping(script, free), **options)


def up_to(text, part):
    """Number of tokens before a part of a text."""
    return len(TOKENIZER.encode(text[: text.index(part)]))


EVERY_API = pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])


@EVERY_API
async def test_text_arrives_while_the_model_samples(path):
    async with dripping([THINKING]) as agent:
        client = Client(agent, path)
        asking = asyncio.create_task(client.ask())
        agent.engine.free = up_to(THINKING, "\n")
        await until(lambda: client.parts["thinking"] == "I should")
        agent.engine.free = up_to(THINKING, "look")
        await until(lambda: client.parts["text"] == "Let me")
        agent.engine.free = up_to(THINKING, "</tool_call>")
        await until(lambda: client.parts["text"] == "Let me look.")
        await until(lambda: agent.engine.told == agent.engine.free)
        assert client.parts == {"thinking": "I should\n  add.  ", "text": "Let me look.", "calls": ""}
        assert agent.session.turns == []
        agent.engine.free = 10_000
        await asking

        (turn,) = agent.session.turns
        check_tokens(agent.session, agent.engine)
        await until(lambda: turn.delivered)
    assert client.parts["thinking"] == turn.message["reasoning_content"]
    assert client.parts["text"] == turn.message["content"]
    assert json.loads(client.parts["calls"]) == {"a": 2, "b": 3}
    assert client.ended


@EVERY_API
@pytest.mark.parametrize(
    "text", [THINKING, "Plain text. ", " \n odd", CALL, "<think>only", "a " + CALL + " b"]
)
async def test_a_streamed_answer_equals_one_in_one_piece(path, text):
    async def play(stream):
        async with dripping([text], free=10_000) as agent:
            client = Client(agent, path)
            if stream:
                await client.ask()
            else:
                await agent.post(path, body_of(path, ASK, tools=[ADD]))
            check_tokens(agent.session, agent.engine)
            captured = agent.captured
        return client.parts, captured.turns[0].message, captured.sequences[0]

    parts, streamed, sequence = await play(stream=True)
    _, plain, plain_sequence = await play(stream=False)

    assert streamed == plain
    assert (sequence.token_ids, sequence.loss_mask) == (plain_sequence.token_ids, plain_sequence.loss_mask)
    assert parts["thinking"] == plain.get("reasoning_content", "")
    assert parts["text"] == plain["content"]


@EVERY_API
async def test_the_events_of_a_stream_are_in_order(path):
    async with dripping([THINKING], free=10_000) as agent:
        client = Client(agent, path)
        await client.ask()

    if path == CHAT:
        assert client.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert client.events[-2]["choices"][0]["finish_reason"] == "tool_calls"
        return
    kinds = [event["type"] for event in client.events]
    if path == MESSAGES:
        starts = [event["content_block"]["type"] for event in client.events if "content_block" in event]
        assert starts == ["thinking", "text", "tool_use"]
        indexes = [event["index"] for event in client.events if "index" in event]
        assert indexes == sorted(indexes)
        assert [kinds.count(f"content_block_{which}") for which in ("start", "stop")] == [3, 3]
        assert client.events[0]["message"]["usage"]["input_tokens"] > 0
        assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
        return
    assert [event["sequence_number"] for event in client.events] == list(range(len(kinds)))
    done = [event["item"] for event in client.events if event["type"] == "response.output_item.done"]
    added = [event["item"] for event in client.events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert client.events[-1]["response"]["output"] == done
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]


@EVERY_API
async def test_a_stop_string_never_reaches_the_client(path):
    more = {CHAT: {"stop": ["Obs:"]}, MESSAGES: {"stop_sequences": ["Obs:"]}, RESPONSES: {}}[path]
    options = {"sampling": Sampling(stop=("Obs:",))} if path == RESPONSES else {}
    async with dripping(["Thought.\nObs: made up"], free=10_000, **options) as agent:
        client = Client(agent, path)
        await client.ask(**more)

        assert client.parts["text"] == "Thought.\n" == agent.session.turns[0].message["content"]


@EVERY_API
async def test_a_client_that_hangs_up_in_mid_stream_leaves_an_untrained_reply(path):
    async with dripping(["Hello there, you."]) as agent:
        client = Client(agent, path)
        asking = asyncio.create_task(client.ask())
        agent.engine.free = 6
        await until(lambda: client.parts["text"] == "Hello")
        await agent.hang_up(asking)
        agent.engine.free = 10_000
        await until(lambda: agent.session.turns and not agent.session.busy)

        captured = agent.captured
        assert captured.left_out == {"undelivered": captured.turns[0].num_tokens}
        assert not captured.has_policy_tokens
        (flight,) = agent.session._flights.values()
        await until(lambda: not flight.live._told)


@EVERY_API
async def test_a_client_that_asks_again_in_mid_stream_gets_the_reply_from_its_beginning(path):
    async with dripping(["Hello there, you."]) as agent:
        first = Client(agent, path)
        asking = asyncio.create_task(first.ask())
        agent.engine.free = 6
        await until(lambda: first.parts["text"] == "Hello")
        await agent.hang_up(asking)
        again = Client(agent, path)
        asking = asyncio.create_task(again.ask())
        await until(lambda: again.parts["text"] == "Hello")
        agent.engine.free = 10_000
        await asking

        assert again.parts["text"] == "Hello there, you."
        assert len(agent.engine.requests) == 1
        await until(lambda: agent.session.turns[0].delivered)
        assert agent.captured.left_out == {}
        assert agent.session.counts["repeated_requests"] == 1


@EVERY_API
async def test_an_engine_that_fails_before_the_first_part_is_an_error_that_may_be_repeated(path):
    async with dripping(["Hello"], free=10) as agent:
        agent.engine.fails_at = 0
        error = await Client(agent, path).ask(status=503)

    assert "the model broke" in error["error"]["message"]


@EVERY_API
@pytest.mark.parametrize("fault", ["fails", "takes back what it told"])
async def test_an_engine_that_breaks_in_mid_stream_breaks_the_stream_off(path, fault):
    async with dripping(["Hello there"], free=100) as agent:
        agent.engine.fails_at = 6 if fault == "fails" else -1
        agent.engine.wrong = fault != "fails"
        client = Client(agent, path)
        await client.ask()

        captured, error = agent.captured, client.events[-1]["error"]
    if fault == "fails":
        assert captured.turns == ()
        assert client.parts["text"] == "Hello"
        assert "the model broke" in error["message"]
    else:
        assert error["code"] == "stream_broken"
        assert captured.left_out == {"undelivered": captured.turns[0].num_tokens}


async def test_a_session_that_is_closed_in_mid_stream_ends_the_stream():
    async with dripping(["Hello there"]) as agent:
        client = Client(agent, CHAT)
        asking = asyncio.create_task(client.ask())
        agent.engine.free = 6
        await until(lambda: client.parts["text"] == "Hello")
        await agent.session.close()
        await asking

    assert client.events[-1]["error"]["code"] == "episode_over"


async def test_requests_in_one_piece_ask_the_engine_for_no_stream():
    async with dripping(["Hello"]) as agent:
        assert (await agent.chat([ASK]))["content"] == "Hello"

        assert agent.engine.told == 0


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_thinking_after_the_text_is_streamed_too(path):
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_special_tokens(["<think>", "</think>"])
    script = ["<think>a</think>Hi <think>b</think>you"]
    async with served(script, renderer=Renderer(tokenizer)) as agent:
        client = Client(agent, path)
        await client.ask()

        message = agent.session.turns[0].message
    assert message["reasoning_content"] == "a\nb"
    assert (client.parts["thinking"], client.parts["text"]) == ("a\nb", message["content"])


async def hasty(http, url, number):
    """An agent that hangs up in mid-stream now and then, and then asks again; its number decides when."""
    random, messages = Random(number), [{"role": "user", "content": f"Question {number}"}]
    while True:
        body = {"model": "m", "messages": messages, "tools": [ADD], "stream": True}
        hang_up = random.random() < 0.5
        said = {"role": "assistant", "content": "", "tool_calls": []}
        async with http.post(f"{url}/v1/chat/completions", json=body) as got:
            assert got.status == 200
            async for line in got.content:
                if hang_up and random.random() < 0.3:
                    got.close()
                    break
                if not line.startswith(b"data: {"):
                    continue
                delta = json.loads(line[6:])["choices"][0]["delta"]
                said["content"] += delta.get("content") or ""
                for made in delta.get("tool_calls", ()):
                    if "id" in made:
                        said["tool_calls"].append({**made, "function": {**made["function"]}})
                    else:
                        said["tool_calls"][-1]["function"]["arguments"] += made["function"]["arguments"]
            else:
                if not said["tool_calls"]:
                    return
                result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "5"}
                messages += [said, result]


async def test_fifty_sessions_whose_clients_hang_up_leak_nothing_and_train_nothing_twice():
    before = asyncio.all_tasks()
    script = by_turn("Let me see. " + CALL, "Once more. " + CALL, "It is 5, I am quite sure of that.")
    engine = ScriptedEngine(script, tokenizer=TOKENIZER)
    sessions = [Session(engine, RENDERER, SessionOptions(name=str(number))) for number in range(50)]
    async with serve_sessions() as endpoint, aiohttp.ClientSession() as http:
        urls = [endpoint.url_of(endpoint.open(session)) for session in sessions]
        async with asyncio.TaskGroup() as group:
            for number, url in enumerate(urls):
                group.create_task(hasty(http, url, number))
        for session in sessions:
            await until(lambda session=session: not session.busy)

    for session in sessions:
        check_tokens(session, engine)
        captured = session.captured()
        delivered = sum(turn.num_tokens for turn in session.turns if turn.delivered)
        assert sum(sequence.num_trained_tokens for sequence in captured.sequences) == delivered > 0
        assert not any(flight.live._told for flight in session._flights.values())
        assert not any(sequence.busy for sequence in session._placer.sequences)
    assert any(session.counts["repeated_requests"] for session in sessions)
    assert asyncio.all_tasks() == before
