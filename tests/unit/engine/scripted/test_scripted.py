"""The scripted engine plays scripts and faults exactly."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.core import ContextTooLong, EngineError, EngineUnavailable, UsageError
from agentenv.engine import Sampling, ScriptedEngine, ScriptedTurn
from agentenv.render import byte_tokenizer

CODEC = byte_tokenizer()
STOP = CODEC.eos_token_ids


async def ask(engine, prompt=(1, 2), session=None, deadline_s=None, **sampling):
    return await engine.generate(
        prompt, Sampling(**sampling), stop_token_ids=STOP, session_id=session, deadline_s=deadline_s
    )


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
WRITTEN = 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("turn", "limits", "tokens", "finish"),
    [
        ("hello", {}, (*b"hello", STOP[0]), "stop"),
        ("hello", {"max_tokens": 3}, (*b"hel",), "length"),
        ([7, 8], {}, (7, 8), "length"),
        (
            {"role": "assistant", "content": "so", "tool_calls": [CALL]},
            {},
            (*CODEC.encode(WRITTEN), STOP[0]),
            "stop",
        ),
    ],
    ids=["text", "cut", "ids", "message"],
)
async def test_a_turn_is_played_exactly(turn, limits, tokens, finish):
    done = await ask(ScriptedEngine([turn], tokenizer=CODEC), **limits)

    assert (done.token_ids, done.finish_reason, len(done.logprobs)) == (tokens, finish, len(tokens))
    assert done.version_ranges == ((0, 0, len(tokens)),)


async def test_each_episode_gets_the_script_from_its_start():
    engine = ScriptedEngine([[1], [2]])

    played = [(await ask(engine, session=name)).token_ids for name in ("a", "b", "a")]
    await engine.release("a")
    played.append((await ask(engine, session="a")).token_ids)

    assert played == [(1,), (1,), (2,), (1,)]
    assert engine.released == ["a"]


async def test_a_script_at_its_end_raises_or_repeats():
    engine = ScriptedEngine([[1]])
    await ask(engine)
    with pytest.raises(EngineError, match="1 turns, but turn 2 was requested"):
        await ask(engine)

    again = ScriptedEngine([[1]], repeat_last=True)
    assert (await ask(again)).token_ids == (await ask(again)).token_ids


async def test_a_policy_sees_the_request_and_may_be_async():
    async def policy(request):
        return [request.turn, len(request.prompt_text)]

    engine = ScriptedEngine(policy, tokenizer=CODEC)
    await ask(engine, prompt=list(b"abc"))

    assert (await ask(engine, prompt=list(b"abcd"))).token_ids == (1, 4)
    assert [len(request.prompt_ids) for request in engine.requests] == [3, 4]


async def test_faults_are_played():
    engine = ScriptedEngine(
        [
            ScriptedTurn(token_ids=[1, 2], finish_reason="abort"),
            ScriptedTurn(token_ids=[1, 2], logprobs=()),
            ScriptedTurn(error=EngineUnavailable("gone")),
            ScriptedTurn(token_ids=[3], sampled_by_policy=False),
        ]
    )

    assert (await ask(engine)).finish_reason == "abort"
    assert (await ask(engine)).logprobs == ()
    with pytest.raises(EngineUnavailable, match="gone"):
        await ask(engine)
    assert not (await ask(engine)).sampled_by_policy


async def test_a_gate_holds_the_answer_and_a_deadline_aborts_it():
    gate = asyncio.Event()
    engine = ScriptedEngine([ScriptedTurn(token_ids=[1], gate=gate)] * 2)
    assert (await ask(engine, deadline_s=0.01)).finish_reason == "abort"
    waiting = asyncio.create_task(ask(engine))
    gate.set()

    assert (await waiting).token_ids == (1,)


async def test_a_prompt_over_the_context_raises():
    with pytest.raises(ContextTooLong):
        await ask(ScriptedEngine([[1]], max_context_tokens=2))


async def test_text_without_a_tokenizer_and_a_turn_of_two_kinds_are_refused():
    with pytest.raises(UsageError, match="tokenizer="):
        await ask(ScriptedEngine(["x"]))
    with pytest.raises(UsageError, match="exactly one"):
        ScriptedTurn(text="x", token_ids=[1])
