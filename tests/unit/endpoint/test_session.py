"""A session appends what was sampled, forks where the client forks, and trains no token twice."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from agentenv.core import RunLimits, StopReason, Supports
from agentenv.engine import Sampling, ScriptedEngine, ScriptedTurn
from agentenv.render import Renderer
from helpers import call_formats, chat_cases
from helpers.agents import (
    ADD,
    ASK,
    CHAT,
    RENDERER,
    THREE_TURNS,
    TOKENIZER,
    by_turn,
    call,
    check_one_sequence,
    check_tokens,
    results,
    served,
)
from helpers.waiting import until

LOOKUP = {"type": "function", "function": {"name": "lookup", "description": "Look up.", "parameters": {}}}


async def play(agent, change=lambda message: message):
    """Ask until the model answers in text; return the conversation."""
    messages = [ASK]
    while True:
        said = await agent.chat(messages)
        messages.append(change(said))
        if not said.get("tool_calls"):
            return messages
        messages.extend(results(said))


def stripped(message):
    return {**message, "content": (message["content"] or "").strip()}


def without_thinking(message):
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def compact(message):
    calls = [
        {
            **made,
            "function": {**made["function"], "arguments": made["function"]["arguments"].replace(" ", "")},
        }
        for made in message.get("tool_calls", ())
    ]
    return {**message, **({"tool_calls": calls} if calls else {}), "provider_specific_fields": {}}


def flattened(message):
    """What smolagents makes of a message."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**made, "function": {**made["function"], "arguments": json.loads(made["function"]["arguments"])}}
        for made in message["tool_calls"]
    ]
    calls.sort(key=lambda made: made["id"])
    text = f"{(message['content'] or '').strip()}\nCalling tools:\n{calls}"
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def with_the_end_of_the_thinking(message):
    """What OpenAI's JavaScript SDK makes of streamed thinking."""
    return {**message, "reasoning_content": (message.get("reasoning_content") or "")[-1:]}


def without_text(message):
    """What crewai and semantic-kernel make of a message with calls."""
    return {**message, "content": None} if message.get("tool_calls") else message


@pytest.mark.parametrize(
    "change",
    [
        lambda message: message,
        stripped,
        without_thinking,
        with_the_end_of_the_thinking,
        without_text,
        compact,
        flattened,
    ],
    ids=lambda f: f.__name__,
)
async def test_whatever_a_client_does_to_its_history_a_linear_conversation_is_one_sequence(change):
    async with served(THREE_TURNS) as agent:
        await play(agent, change)
        captured = check_one_sequence(agent)

    assert [message["role"] for message in captured.messages][:2] == ["user", "assistant"]


def renumbered(messages):
    """The messages with the ids of their calls counted anew in each turn."""
    ids = {}
    for message in messages:
        for index, made in enumerate(message.get("tool_calls") or ()):
            ids[made["id"]] = f"call_{index}"
    return [
        {
            **message,
            **({"tool_call_id": ids[message["tool_call_id"]]} if "tool_call_id" in message else {}),
            "tool_calls": [{**made, "id": ids[made["id"]]} for made in message.get("tool_calls") or ()],
        }
        for message in messages
    ]


async def test_ids_that_a_client_renumbers_do_not_matter_where_the_model_never_reads_them():
    async with served(THREE_TURNS) as agent:
        messages = [ASK]
        for number in range(3):
            said = await agent.chat(renumbered(messages))
            messages += [said, *results(said, f"{number}")] if said.get("tool_calls") else [said]
        captured = check_one_sequence(agent)

    assert [result.content for result in captured.turns[0].tool_results] == ["0", "0"]
    assert [result.content for result in captured.turns[1].tool_results] == ["1"]


async def test_ids_that_a_client_renumbers_begin_another_sequence_where_the_model_reads_them():
    renderer = Renderer(chat_cases.tokenizer_for(call_formats.CALL_FORMATS["mistral"]))
    turns = by_turn('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdefghi"}]', "3")
    async with served(turns, renderer=renderer) as agent:
        said = await agent.chat([ASK])
        await agent.chat(renumbered([ASK, said, *results(said)]))

    assert agent.causes == ["edited"]


async def test_the_prompts_are_those_that_the_runner_would_send():
    async with served(THREE_TURNS) as agent:
        messages = await play(agent, without_thinking)

        (first, second, third) = agent.captured.turns
        ids = agent.captured.sequences[0].token_ids
    bound = RENDERER.bind([ADD])

    assert ids[: first.start] == bound.start([ASK])
    assert ids[first.end : second.start] == bound.extend(
        ids[first.start : first.end],
        first.tool_calls,
        [{**message, "name": "add"} for message in messages[2:4]],
    )
    assert [result.content for result in first.tool_results] == ["5", "5"]
    assert [result.content for result in second.tool_results] == ["5"]
    assert third.tool_results == ()


def system(text):
    return {"role": "system", "content": text}


@pytest.mark.parametrize(
    ("first", "then", "tools", "cause"),
    [
        ([ASK], lambda said: [ASK, {**said, "content": "I look."}], [ADD], "edited"),
        ([ASK], lambda said: [ASK, {**said, "reasoning_content": "other"}], [ADD], "edited"),
        ([ASK], lambda said: [{**ASK, "content": "What is 2+4?"}, said], [ADD], "edited"),
        ([system("Add."), ASK], lambda said: [system("Add."), ASK, said], [ADD, LOOKUP], "tools"),
        ([system("Add."), ASK], lambda said: [system("Subtract."), ASK, said], [ADD], "system"),
        ([system("Add."), ASK], lambda said: [system("End."), ASK, said], [], "system"),
    ],
    ids=["reply", "thinking", "question", "tools", "system", "system and tools"],
)
async def test_what_a_client_changes_begins_another_sequence_and_is_named(first, then, tools, cause):
    async with served(THREE_TURNS) as agent:
        said = await agent.chat(first)
        changed = then(said)
        await agent.chat([*changed, *results(said)], tools=tools)

        check_tokens(agent.session, agent.engine)
        (rewrite,) = agent.captured.rewrites
    assert (rewrite.turn, rewrite.cause, rewrite.parent) == (1, cause, None)
    wanted = [message["content"].strip() for message in changed]
    assert [message["content"].strip() for message in rewrite.messages[: len(changed)]] == wanted
    assert agent.session.counts[f"forks_{cause}"] == 1


async def test_tools_in_another_order_are_the_same_tools():
    async with served(THREE_TURNS) as agent:
        said = await agent.chat([ASK], tools=[ADD, LOOKUP])
        await agent.chat([ASK, said, *results(said)], tools=[LOOKUP, ADD])
        check_one_sequence(agent, 2)


async def test_a_turn_that_is_asked_again_shares_the_tokens_before_it():
    async with served(THREE_TURNS) as agent:
        messages = await play(agent)
        await agent.chat([*messages[:-1], {"role": "user", "content": "Think again."}])

        captured = agent.captured
        check_tokens(agent.session, agent.engine)

    (rewrite,) = captured.rewrites
    first, second = captured.sequences
    assert (rewrite.cause, rewrite.parent) == ("forked", 0)
    assert second.token_ids[: rewrite.shared_tokens] == first.token_ids[: rewrite.shared_tokens]
    assert rewrite.shared_tokens == captured.turns[1].end
    assert [span.source for span in second.spans] == ["prompt", "model"]
    assert sum(sequence.num_trained_tokens for sequence in captured.sequences) == sum(
        turn.num_tokens for turn in captured.turns
    )


async def test_other_conversations_of_the_same_session_are_sequences_of_their_own():
    async with served(THREE_TURNS) as agent:
        said = await agent.chat([ASK])
        await agent.chat(
            [{"role": "system", "content": "You help."}, {"role": "user", "content": "Sub task"}]
        )
        await agent.chat([ASK, said, *results(said)])

        captured = agent.captured
        check_tokens(agent.session, agent.engine)

    assert [turn.sequence for turn in captured.turns] == [0, 1, 1]
    assert [rewrite.cause for rewrite in captured.rewrites] == ["new"]
    assert captured.rewrites[0].messages == (ASK,), "the conversation that goes on last stands last"
    assert captured.left_out == {}, "it had tools"


async def test_calls_that_the_model_repeats_get_ids_of_their_own():
    async with served(by_turn(call('{"a": 1, "b": 1}'))) as agent:
        said = await agent.chat([ASK])
        history = [ASK, said, *results(said)]
        again = await agent.chat(history)
        last = await agent.chat([*history, again, *results(again)])

        ids = [message["tool_calls"][0]["id"] for message in (said, again, last)]
        assert len(set(ids)) == 3
        assert len(agent.captured.sequences) == 1
        check_tokens(agent.session, agent.engine)


async def test_auxiliary_conversations_are_not_trained_and_counted():
    async with served(THREE_TURNS) as agent:
        await agent.chat([{"role": "user", "content": "Title of this conversation?"}], tools=())
        await play(agent)

        captured = agent.captured

    assert captured.left_out == {"auxiliary": captured.turns[0].num_tokens}
    assert [span.source for span in captured.sequences[0].spans] == ["prompt", "other"]


@pytest.mark.parametrize(
    ("options", "tools", "trained"),
    [
        ({}, [()], [True]),
        ({"choice": "all"}, [(), [ADD]], [True, True]),
        ({"choice": lambda sequence: not sequence.has_tools}, [(), [ADD]], [True, False]),
    ],
    ids=["alone", "all", "function"],
)
async def test_an_agent_that_asks_once_without_tools_is_trained_and_the_author_may_choose(
    options, tools, trained
):
    async with served(THREE_TURNS, **options) as agent:
        for offered in tools:
            await agent.chat([ASK], tools=offered)

        assert [sequence.num_trained_tokens > 0 for sequence in agent.captured.sequences] == trained


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_reply_that_nobody_received_is_not_trained(stream):
    gate = asyncio.Event()
    async with served([ScriptedTurn(text="late", gate=gate)]) as agent:
        await agent.hang_up(asyncio.create_task(agent.chat([ASK], stream=stream)))
        gate.set()
        await until(lambda: agent.session.turns and not agent.session.busy)

        captured = agent.captured

    assert captured.left_out == {"undelivered": captured.turns[0].num_tokens}
    assert not captured.has_policy_tokens


@pytest.mark.parametrize("headers", [None, {"x-stainless-retry-count": "1"}], ids=["bare", "retry"])
async def test_a_request_that_is_repeated_gets_the_first_reply(headers):
    gate = asyncio.Event()
    async with served([ScriptedTurn(text="late", gate=gate), "another"]) as agent:
        await agent.hang_up(asyncio.create_task(agent.chat([ASK])))
        again = asyncio.create_task(agent.chat([ASK], headers=headers))
        await until(lambda: agent.session.counts["repeated_requests"])
        gate.set()

        assert (await again)["content"] == "late"
        assert len(agent.engine.requests) == 1
        await until(lambda: agent.session.turns[0].delivered)
        assert agent.captured.left_out == {}


async def test_two_equal_requests_at_once_are_two_samples():
    gate = asyncio.Event()
    script = [ScriptedTurn(text="one", gate=gate)]
    async with served(script) as agent:
        both = [asyncio.create_task(agent.chat([ASK])) for _ in range(2)]
        await until(lambda: len(agent.engine.requests) == 2)
        gate.set()
        await asyncio.gather(*both)

        captured = agent.captured
    assert len(captured.sequences) == 2
    assert captured.left_out == {}


async def test_requests_that_go_on_from_one_reply_at_once_do_not_share_a_sequence():
    gate = asyncio.Event()

    def policy(request):
        return ScriptedTurn(text="done", gate=gate if "Which" in request.prompt_text else None)

    async with served(policy) as agent:
        said = await agent.chat([ASK])
        both = [
            asyncio.create_task(agent.chat([ASK, said, {"role": "user", "content": f"Which {number}"}]))
            for number in range(2)
        ]
        await until(lambda: len(agent.engine.requests) == 3)
        gate.set()
        await asyncio.gather(*both)

        check_tokens(agent.session, agent.engine)
        assert agent.causes == ["parallel"]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (RunLimits(max_turns=1), StopReason.MAX_TURNS),
        (RunLimits(max_turns=None, max_total_tokens=1), StopReason.GENERATION_LENGTH),
    ],
)
async def test_a_limit_refuses_requests_in_a_way_that_no_sdk_repeats(limits, reason):
    async with served(THREE_TURNS, limits=limits) as agent:
        await agent.chat([ASK])
        error = await agent.chat([ASK, {"role": "user", "content": "more"}], status=400)

        assert error["code"] == "episode_over"
        assert agent.session.stop is reason
        assert len(agent.engine.requests) == 1


async def test_a_full_context_is_told_and_does_not_end_the_session():
    async with served(THREE_TURNS, limits=RunLimits(max_context_tokens=600)) as agent:
        error = await agent.chat([{"role": "user", "content": "x" * 700}], status=400)
        await agent.chat([ASK])

        assert error["code"] == "context_length_exceeded"
        assert agent.session.stop is None
        assert len(agent.captured.turns) == 1


async def test_a_reply_that_was_cut_has_no_calls():
    async with served(
        [ScriptedTurn(text=call('{"a": 1, "b": 2}'))], sampling=Sampling(max_tokens=12)
    ) as agent:
        said = await agent.chat([ASK])

        assert "tool_calls" not in said
        assert agent.captured.turns[0].finish_reason == "length"


@pytest.mark.parametrize("put_back", ["", "Observation:"])
async def test_a_stop_string_ends_the_reply_and_its_tokens_are_kept_whether_it_is_put_back_or_not(put_back):
    async with served(["Thought\nObservation: made up"] * 2) as agent:
        said = await agent.chat([ASK], stop=["Observation:"])
        history = [ASK, {**said, "content": said["content"] + put_back}, {"role": "user", "content": "go on"}]
        again = await agent.chat(history, stop=["Observation:"])

        turn, *_ = check_one_sequence(agent, 2).turns
        (sequence,) = agent.captured.sequences
    assert said["content"] == again["content"] == "Thought\n"
    assert TOKENIZER.decode(sequence.token_ids[turn.start : turn.end]) == "Thought\nObservation:"


async def test_the_settings_of_the_run_replace_those_of_the_client():
    sampling = Sampling(temperature=0.7, max_tokens=50)
    async with served(["ok"], sampling=sampling) as agent:
        await agent.chat([ASK], temperature=0.0, max_tokens=20, logprobs=True)

        asked = agent.engine.requests[0].sampling
        assert (asked.temperature, asked.max_tokens) == (0.7, 20)
        assert agent.session.counts["ignored_temperature"] == 1
        assert agent.session.counts["ignored_logprobs"] == 1


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        {"messages": [{"content": "no role"}]},
        {"messages": "text"},
        {"messages": []},
        {"nothing": 1},
        {"messages": [ASK], "n": 2},
        {"messages": [ASK], "tools": [{"type": "web_search"}]},
    ],
    ids=str,
)
async def test_what_cannot_be_served_is_told(body):
    async with served(["ok"]) as agent, agent.http.post(f"{agent.url}{CHAT}", json=body) as got:
        assert got.status == 400
        assert (await got.json())["error"]["message"]
        assert got.headers["x-should-retry"] == "false"
        assert agent.engine.requests == []


async def test_an_engine_that_fails_is_no_answer_and_may_be_asked_again():
    async with served([ScriptedTurn(error=RuntimeError("boom")), "fine"]) as agent:
        error = await agent.chat([ASK], status=503)
        said = await agent.chat([ASK])

        assert "boom" in error["message"]
        assert said["content"] == "fine"
        assert len(agent.captured.turns) == 1


async def test_a_session_that_is_closed_ends_its_requests():
    gate = asyncio.Event()
    async with served([ScriptedTurn(text="never", gate=gate)]) as agent:
        asking = asyncio.create_task(agent.chat([ASK], status=400))
        await until(lambda: agent.session.busy)
        await agent.session.close()

        assert (await asking)["code"] == "episode_over"
        assert (await agent.chat([ASK], status=400))["code"] == "episode_over"


async def test_an_address_without_a_session_is_refused():
    async with served(["ok"]) as agent:
        agent.url = agent.endpoint.url_of("nothing")

        assert (await agent.chat([ASK], status=404))["code"] == "no_session"
        assert isinstance(agent.engine, ScriptedEngine)


async def test_a_session_of_a_cut_distribution_is_trained_only_with_supports():
    class Kept(ScriptedEngine):
        async def generate(self, prompt_ids, sampling, **request):
            done = await super().generate(prompt_ids, sampling, **request)
            if not self.requests[1:]:
                return replace(done, supports=Supports.of({token, 3} for token in done.token_ids))
            return replace(done, no_supports="token 0 had too large a support: set top_k")

    sampling = Sampling(top_p=0.9, keep_support=True)
    reasons = []
    engine = Kept(THREE_TURNS, tokenizer=TOKENIZER)
    async with served(engine=engine, sampling=sampling) as agent:
        messages = [ASK]
        for _ in range(2):
            said = await agent.chat(messages)
            messages += [said, *results(said)]
            reasons.append(agent.captured.untrainable_reason)

        spans = [span for span in agent.captured.sequences[0].spans if span.trained]
    assert reasons == ["", "token 0 had too large a support: set top_k"]
    assert [span.supports is not None for span in spans] == [True, False]
