"""The doctor's list of requests says what a chat API can do, what the engine does about it, and what stays."""

from __future__ import annotations

import pytest

from agentenv.engine import load_engine
from agentenv.engine.examination import examine_model
from agentenv_providers.openai.questions import QUESTIONS
from field.apis import BACK, CALLS, PARAMETERS, Case, playing


async def findings_on(case, **options):
    async with playing([case]) as (url, player):
        loaded = load_engine("openai:m", base_url=url, api_key="k", retry_s=0, **options)
        found = {each.name: each for each in await examine_model(loaded)}
        await loaded.engine.close()
    return found, player.bodies


async def test_an_ordinary_api_is_asked_about_forty_things_and_can_play_an_episode():
    found, bodies = await findings_on(CALLS[0])

    assert len({question.name for question in QUESTIONS}) == len(QUESTIONS) >= 40
    assert set(found) >= {question.name for question in QUESTIONS}
    for name in ("text", "a call", "a call in a stream", "streaming", "seed", "an episode"):
        assert found[name].ok, found[name].line()
    assert len(bodies) < 60


@pytest.mark.parametrize(
    ("refused", "name"),
    [("seed", "seed"), ("temperature", "temperature 0"), ("max_tokens", "max_tokens")],
)
async def test_what_an_api_refuses_is_said_with_what_the_engine_does(refused, name):
    case = next(case for case in PARAMETERS if case.refuses == refused)
    found, _ = await findings_on(case)

    assert found[name].ok is None
    assert refused in found[name].detail
    assert found[name].does
    assert found["an episode"].ok


async def test_what_the_engine_cannot_mend_stays_wrong():
    case = Case("no tools", refuses="tools", error={"error": {"message": "No room for {} today"}})
    found, _ = await findings_on(case)

    assert found["a result"].ok is False
    assert found["a result"].stays == "tools"
    assert "stays wrong: tools" in found["a result"].line()
    assert found["an episode"].ok is False


async def test_an_api_that_wants_its_own_words_back_gets_them():
    case = next(case for case in BACK if case.name == "a key of a call")
    found, _ = await findings_on(case)

    assert found["its own words in the history"].ok
    assert "tool_calls" in found["its own words in the history"].detail
    assert found["an episode"].ok


async def test_nothing_that_an_api_answers_breaks_the_list():
    found, _ = await findings_on(Case("odd", body={"choices": [{"message": {"content": 7}}]}))

    assert "the content is 7" in found["an episode"].detail
    assert found["an episode"].ok is False


async def test_an_address_where_nothing_answers_is_said():
    loaded = load_engine("openai:m", base_url="http://127.0.0.1:9/v1", api_key="k", retry_s=0)
    found = {each.name: each for each in await examine_model(loaded)}
    await loaded.engine.close()

    assert found["text"].ok is False
    assert "Cannot connect" in found["text"].detail
