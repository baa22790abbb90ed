"""Whatever a chat API says arrives whole and goes back whole: every case of `field.apis`, in four ways."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core import EngineError, RunLimits
from agentenv.core.messages import PROVIDER_FIELDS
from agentenv.engine import Sampling
from agentenv.envs.rewards import Judge
from agentenv.runner import Runner
from agentenv.runs.store import RunInfo
from agentenv.runs.store.codec import decode_trajectory, encode_line, loads
from agentenv_bridges import to_atif, to_inspect, to_openai, to_sft
from agentenv_providers import OpenAIChatEngine
from agentenv_providers.openai import client as chat_client
from agentenv_providers.openai.reply import MAX_CALLS, Unreadable, sent_back, whole_reply
from agentenv_providers.openai.stream import joined
from field.apis import ALL, BACK, CALL, ERRORS, PARAMETERS, SUM, TEXTS, Adder, AgentAdder, Case, playing


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(chat_client, "FIRST_PAUSE_S", 0.0)


@asynccontextmanager
async def engine_of(*cases, **options):
    """Yield an engine on an API that plays the cases, and the bodies of its requests."""
    async with playing(cases) as (url, player):
        engine = OpenAIChatEngine("m", base_url=url, api_key="k", **options)
        try:
            yield engine, player.bodies
        finally:
            await engine.close()


async def ask(engine, **sampling):
    return await engine.chat([{"role": "user", "content": "hi"}], [], Sampling(**sampling))


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
    async with engine_of(case, stream=stream, retry_s=60) as (engine, _):
        episode = await played(engine, env)

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
    case = Case("any", body=answer if not isinstance(answer, str) else f'"{answer}"')
    async with engine_of(case, retry_s=0) as (engine, _):
        with suppress(EngineError):
            assert is_whole((await ask(engine)).message)


async def test_the_fields_of_one_api_are_not_sent_to_another():
    said = {"content": None, "tool_calls": [], "reasoning_details": [1]}
    message = whole_reply({"message": said}, "a").message

    assert sent_back(message, "b") == {"role": "assistant", "content": ""}
    assert sent_back(message, "a") == {"role": "assistant", "content": None, "reasoning_details": [1]}


async def test_a_message_that_was_shortened_goes_back_without_what_belonged_to_the_long_one():
    said = {"content": [{"type": "text", "text": "long", "signature": "x"}]}
    message = {**whole_reply({"message": said}, "a").message, "content": "l"}

    assert sent_back(message, "a") == {"role": "assistant", "content": "l"}


def test_a_reply_with_more_calls_than_anybody_means_is_malformed():
    most, more = (
        whole_reply({"message": {"content": "So.", "tool_calls": [CALL] * n}}, "a")
        for n in (MAX_CALLS, MAX_CALLS + 1)
    )

    assert (len(most.message["tool_calls"]), most.malformed) == (MAX_CALLS, False)
    assert (more.message, more.malformed) == ({"role": "assistant", "content": "So."}, True)


@pytest.mark.parametrize(
    "case", [case for case in PARAMETERS if case.refuses == "seed"], ids=lambda case: case.name
)
async def test_what_is_left_out_is_told_once_and_seeds_are_small(case, caplog):
    async with engine_of(case, retry_s=0) as (engine, bodies):
        for _ in range(3):
            await ask(engine, seed=2**62 + 5)

    assert ["seed" in body for body in bodies] == [True, False, False, False]
    assert bodies[0]["seed"] < 2**31
    assert sum("left out" in record.message for record in caplog.records) == 1


async def test_what_is_named_is_never_sent():
    strict = Case("strict", refuses="seed", error={"error": {"message": "no"}})
    async with engine_of(strict, leave_out=["seed"]) as (engine, bodies):
        await ask(engine, seed=1)

    assert len(bodies) == 1


async def test_what_only_the_api_knows_is_stored_and_no_row_of_an_export_has_it():
    async with engine_of(next(case for case in BACK if case.name == "a key of a call")) as (engine, _):
        episode = await played(engine, Adder)

    stored = decode_trajectory(loads(encode_line(episode)))
    assert stored.turns[0].message[PROVIDER_FIELDS]["fields"]["tool_calls"][0]["extra_content"]
    logs = to_inspect([stored], RunInfo(id="x", kind="eval"))
    for rows in (to_openai([stored]), to_sft([stored]), [to_atif(stored)], logs.values()):
        assert (written := str(list(rows)))
        assert "extra_content" not in written


async def test_texts_are_cut_at_stop_strings_that_an_api_does_not_take():
    case = Case(
        "no stop", first={"content": "one END two"}, refuses="stop", error={"detail": "unknown field: stop"}
    )
    async with engine_of(case) as (engine, _):
        assert (await ask(engine, stop=("END",))).message["content"] == "one "


@pytest.mark.parametrize(
    "case", [case for case in TEXTS if SUM in str(case.then)], ids=lambda case: case.name
)
async def test_a_judge_reads_what_an_api_says(case):
    said = json.loads(json.dumps(case.then).replace(SUM, "Good.\\nSCORE: 8").replace("\\ud83d", ""))
    said = said if "The sum" not in str(said) else {"content": ["Good.\nSCO", "RE: 8"]}
    async with engine_of(Case("judge", first=said)) as (engine, _):
        assert await Judge(engine, "Judge {answer}.")(answer="5") == 0.8


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case.name)
async def test_a_judge_gives_no_score_where_an_api_gives_no_answer_and_says_why(case, caplog):
    async with engine_of(case, retry_s=60) as (engine, _):
        assert await Judge(engine, "Judge {answer}.", tries=1)(answer="5") is None

    assert any(record.message.startswith("judge judge") for record in caplog.records)


@pytest.mark.slow
async def test_a_thousand_episodes_against_all_odd_apis_at_once_are_all_accounted_for():
    # One API cannot refuse the reasoning of its own answers and also ask for it.
    mixed = [number for number, case in enumerate(ALL) if case.refuses != "reasoning"]
    order = Random(0).choices(mixed, k=1000)
    async with engine_of(*ALL, retry_s=60, concurrency=64) as (engine, _):
        episodes = await asyncio.gather(*(played(engine, Adder, number) for number in order))

    for number, episode in zip(order, episodes, strict=True):
        judge(ALL[number], episode, agent=False)
        if ALL[number].expects in (1.0, "exactly"):
            assert episode.reward == 1.0
