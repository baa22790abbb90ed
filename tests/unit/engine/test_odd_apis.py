"""Whatever a chat API says arrives whole and goes back whole: every case of `helpers.odd_apis`, in four ways."""

from __future__ import annotations

import asyncio
import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core import EngineError, RunLimits
from agentenv.core.messages import PROVIDER_FIELDS
from agentenv.engine import OpenAIChatEngine, Sampling, chat_client
from agentenv.engine.chat_reply import Unreadable, sent_back, whole_reply
from agentenv.engine.chat_stream import joined
from agentenv.envs.rewards import Judge
from agentenv.runner import Runner
from agentenv.runs.store import RunInfo
from agentenv.runs.store.codec import decode_trajectory, encode_line, loads
from agentenv_bridges import to_atif, to_inspect, to_openai, to_sft
from helpers.odd_apis import ALL, BACK, ERRORS, PARAMETERS, SUM, TEXTS, Adder, AgentAdder, Case, playing


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(chat_client, "FIRST_PAUSE_S", 0.0)


async def played(engine, env, case=0):
    return await Runner(engine, None, RunLimits(max_turns=4), sampling=Sampling(stop=("###",))).run_episode(
        env(), {"case": case}
    )


def judge(case: Case, episode, *, agent: bool) -> None:
    expected = case.expects
    if isinstance(expected, float):
        assert episode.error is None, episode.error
        assert episode.reward == expected
    elif expected == "exactly":
        assert (episode.answer, episode.reward) == (SUM, 1.0)
    elif expected == "unread":  # the model's mistake: it is told, and scored
        assert episode.reward == 0.0
        if not agent:
            told = [result.error_kind for turn in episode.turns for result in turn.tool_results]
            assert told[0] == "invalid_json"
    elif episode.error is not None:
        assert episode.reward is None
        assert expected in episode.error.message
    else:
        assert (episode.stop_reason.value, episode.reward) == (expected, 0.0)


WAYS = {
    "whole": (Adder, False),
    "streamed": (Adder, True),
    "agent": (AgentAdder, False),
    "streamed to an agent": (AgentAdder, True),
}


@pytest.mark.parametrize(("env", "stream"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("case", [case for case in ALL if case not in PARAMETERS], ids=lambda case: case.name)
async def test_an_odd_answer_is_scored_like_an_ordinary_one_or_said_in_words(case, stream, env):
    async with playing([case]) as (url, _):
        engine = OpenAIChatEngine("m", base_url=url, api_key="k", stream=stream, retry_s=60)
        episode = await played(engine, env)
        await engine.close()

    if case.expects == "context_length" and env is AgentAdder:
        assert episode.stop_reason.value == "context_length"
    else:
        judge(case, episode, agent=env is AgentAdder)


KEYS = ["type", "text", "thinking", "function", "name", "arguments", "id", "index", "content", "reasoning"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner)
    ),
    max_leaves=8,
)
FIELDS = ["role", "content", "refusal", "reasoning", "reasoning_content", "tool_calls", "function_call", "x"]
MESSAGE = JSON | st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, JSON))
CHOICE = JSON | st.fixed_dictionaries(
    {}, optional={"message": MESSAGE, "delta": MESSAGE, "finish_reason": JSON}
)


def is_whole(message) -> bool:
    made = message.get("tool_calls", [])
    texts = [message["content"], message.get("reasoning_content", "")]
    texts += [part for one in made for part in (one["id"], *one["function"].values())]
    return all(isinstance(text, str) for text in texts) and len({one["id"] for one in made}) == len(made)


@settings(deadline=None)
@given(choice=CHOICE, text_tools=st.booleans())
def test_any_json_gives_a_whole_reply_or_an_error_in_words(choice, text_tools):
    try:
        reply = whole_reply(choice, "a", tools=text_tools, text_tools=text_tools)
    except (Unreadable, EOFError):
        return

    assert is_whole(reply.message)
    back = sent_back(reply.message, "a")
    again = whole_reply({"message": back, "finish_reason": None}, "a").message
    assert PROVIDER_FIELDS not in back
    if not text_tools:
        for message in (again, expected := {**reply.message}):
            message.pop(PROVIDER_FIELDS, None)
        assert again == expected


@settings(deadline=None)
@given(
    chunks=st.lists(
        JSON | st.fixed_dictionaries({"choices": JSON | st.lists(CHOICE, max_size=2)}), max_size=4
    )
)
async def test_any_stream_of_json_gives_an_answer_or_an_error_in_words(chunks):
    async def stream():
        for chunk in chunks:
            yield chunk

    try:
        answer = await joined(stream())
        reply = whole_reply(answer["choices"][0], "a")
    except (Unreadable, EOFError):
        return

    assert is_whole(reply.message)


@settings(deadline=None, max_examples=50)
@given(
    answer=JSON
    | st.fixed_dictionaries(
        {"choices": JSON | st.lists(CHOICE, max_size=1)}, optional={"usage": JSON, "error": JSON}
    )
)
async def test_any_answer_to_a_request_is_a_completion_or_an_error_of_the_engine(answer):
    case = Case(name="any", body=answer if not isinstance(answer, str) else f'"{answer}"')
    async with playing([case]) as (url, _):
        engine = OpenAIChatEngine("m", base_url=url, api_key="k", retry_s=0)
        try:
            done = await engine.chat([{"role": "user", "content": "hi"}], [], Sampling())
            assert is_whole(done.message)
        except EngineError:
            pass
        finally:
            await engine.close()


async def test_the_fields_of_one_api_are_not_sent_to_another():
    said = {"content": None, "tool_calls": [], "reasoning_details": [1]}
    message = whole_reply({"message": said}, "a").message

    assert sent_back(message, "b") == {"role": "assistant", "content": ""}
    assert sent_back(message, "a") == {"role": "assistant", "content": None, "reasoning_details": [1]}


async def test_a_message_that_was_shortened_goes_back_without_what_belonged_to_the_long_one():
    said = {"content": [{"type": "text", "text": "long", "signature": "x"}]}
    message = {**whole_reply({"message": said}, "a").message, "content": "l"}

    assert sent_back(message, "a") == {"role": "assistant", "content": "l"}


@pytest.mark.parametrize(
    "case", [case for case in PARAMETERS if case.refuses == "seed"], ids=lambda case: case.name
)
async def test_what_is_left_out_is_told_once_and_seeds_are_small(case, caplog):
    async with playing([case]) as (url, player):
        engine = OpenAIChatEngine("m", base_url=url, api_key="k", retry_s=0)
        for _ in range(3):
            await engine.chat([{"role": "user", "content": "hi"}], [], Sampling(seed=2**62 + 5))
        await engine.close()

    assert ["seed" in body for body in player.bodies] == [True, False, False, False]
    assert player.bodies[0]["seed"] < 2**31
    assert sum("left out" in record.message for record in caplog.records) == 1


async def test_what_is_named_is_never_sent():
    async with playing([Case(name="strict", refuses="seed", error={"error": {"message": "no"}})]) as (
        url,
        player,
    ):
        engine = OpenAIChatEngine("m", base_url=url, api_key="k", leave_out=["seed"])
        await engine.chat([{"role": "user", "content": "hi"}], [], Sampling(seed=1))
        await engine.close()

    assert len(player.bodies) == 1


async def test_what_only_the_api_knows_is_stored_and_no_row_of_an_export_has_it():
    case = next(case for case in BACK if case.name == "a key of a call")
    async with playing([case]) as (url, _):
        engine = OpenAIChatEngine("m", base_url=url, api_key="k")
        episode = await played(engine, Adder)
        await engine.close()

    stored = decode_trajectory(loads(encode_line(episode)))
    assert stored.turns[0].message[PROVIDER_FIELDS]["fields"]["tool_calls"][0]["extra_content"]
    logs = to_inspect([stored], RunInfo(id="x", kind="eval"))
    for rows in (to_openai([stored]), to_sft([stored]), [to_atif(stored)], logs.values()):
        assert (written := str(list(rows)))
        assert "extra_content" not in written


async def test_texts_are_cut_at_stop_strings_that_an_api_does_not_take():
    case = Case(
        name="no stop",
        first={"content": "one END two"},
        refuses="stop",
        error={"detail": "unknown field: stop"},
    )
    async with playing([case]) as (url, _):
        engine = OpenAIChatEngine("m", base_url=url, api_key="k")
        done = await engine.chat([{"role": "user", "content": "hi"}], [], Sampling(stop=("END",)))
        await engine.close()

    assert done.message["content"] == "one "


@pytest.mark.parametrize(
    "case", [case for case in TEXTS if SUM in str(case.then)], ids=lambda case: case.name
)
async def test_a_judge_reads_what_an_api_says(case):
    said = json.loads(json.dumps(case.then).replace(SUM, "Good.\\nSCORE: 8").replace("\\ud83d", ""))
    said = said if "The sum" not in str(said) else {"content": ["Good.\nSCO", "RE: 8"]}
    async with playing([Case(name="judge", first=said)]) as (url, _):
        engine = OpenAIChatEngine("m", base_url=url, api_key="k")
        assert await Judge(engine, "Judge {answer}.")(answer="5") == 0.8
        await engine.close()


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case.name)
async def test_a_judge_gives_no_score_where_an_api_gives_no_answer_and_says_why(case, caplog):
    async with playing([case]) as (url, _):
        engine = OpenAIChatEngine("m", base_url=url, api_key="k", retry_s=60)
        assert await Judge(engine, "Judge {answer}.", tries=1)(answer="5") is None
        await engine.close()

    assert any(record.message.startswith("judge judge") for record in caplog.records)


@pytest.mark.slow
async def test_a_thousand_episodes_against_all_odd_apis_at_once_are_all_accounted_for():
    # One API cannot refuse the reasoning of its own answers and also ask for it.
    mixed = [number for number, case in enumerate(ALL) if case.refuses != "reasoning"]
    order = Random(0).choices(mixed, k=1000)
    async with playing(ALL) as (url, _):
        engine = OpenAIChatEngine("m", base_url=url, api_key="k", retry_s=60, concurrency=64)
        episodes = await asyncio.gather(*(played(engine, Adder, number) for number in order))
        await engine.close()

    cases = [ALL[number] for number in order]
    for case, episode in zip(cases, episodes, strict=True):
        judge(case, episode, agent=False)
    ordinary = [
        one.reward for one, case in zip(episodes, cases, strict=True) if case.expects in (1.0, "exactly")
    ]
    assert set(ordinary) == {1.0}
