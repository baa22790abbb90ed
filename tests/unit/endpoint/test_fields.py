"""Every field of the three APIs is followed, counted, refused, or asks nothing of the model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentenv.core.episode_env import derive_seed
from agentenv.endpoint.wire.fields import CHAT, MESSAGES, RESPONSES
from helpers import agents
from helpers.agents import ASK, body_of, served

APIS = {agents.CHAT: CHAT, agents.RESPONSES: RESPONSES, agents.MESSAGES: MESSAGES}
DOCS = Path(__file__).parents[3] / "docs" / "reference" / "agents-fields.md"


CASES = [(path, name, done) for path, table in APIS.items() for name, done in table.items()]


@pytest.mark.parametrize(("path", "name", "done"), [case for case in CASES if case[2] != "followed"])
async def test_what_is_not_followed_is_counted_or_refused_unless_it_asks_nothing(path, name, done):
    async with served(["ok"]) as agent:
        value = {"counted": {"some": "value"}, "refused": 2}.get(done, "value")
        said = await agent.post(path, body_of(path, ASK, **{name: value}), 400 if done == "refused" else 200)

        assert agent.ignored == ({f"ignored_{name}"} if done == "counted" else set())
        if done == "refused":
            assert name in said["error"]["message"]
            assert agent.engine.requests == []


@pytest.mark.parametrize("path", APIS)
async def test_a_field_that_nobody_knows_is_counted(path):
    strange = {f"strange_{number}": 1 for number in range(30)} | {"not a name": 1}
    async with served(["ok"]) as agent:
        await agent.post(path, body_of(path, ASK, **strange))

        counts = {name: n for name, n in agent.session.counts.items() if name.startswith("ignored_")}
        assert counts["ignored_strange_0"] == 1
        assert sum(counts.values()) == 31
        assert len(counts) == 17, "a client cannot make as many counts as it likes"


@pytest.mark.parametrize(
    "settings",
    [{"n": 1}, {"response_format": {"type": "text"}}, {"logprobs": False}, {"temperature": None}],
    ids=str,
)
async def test_a_value_that_asks_for_nothing_is_not_counted(settings):
    async with served(["ok"]) as agent:
        await agent.chat([ASK], tools=(), **settings)

        assert agent.ignored == set()


async def test_a_seed_gives_equal_requests_of_an_episode_the_same_seed():
    seeds = []
    for member in range(2):
        async with served(["ok"] * 3, seed_of=lambda number, member=member: 100 * member + number) as agent:
            for seed in (7, 7, 8):
                await agent.chat([ASK], seed=seed)
        seeds.append([request.sampling.seed for request in agent.engine.requests])

    assert seeds[0][0] == seeds[0][1] == derive_seed(0, "client", 7)
    assert seeds[0][0] != seeds[0][2]
    assert seeds[0][0] != seeds[1][0], "members of a group must not be equal"


@pytest.mark.parametrize("seed", ["7", 1.5, True], ids=repr)
async def test_a_seed_that_is_no_whole_number_is_refused(seed):
    async with served(["ok"]) as agent:
        assert "seed" in (await agent.chat([ASK], seed=seed, status=400))["message"]


def test_the_page_has_the_tables():
    text = DOCS.read_text()
    rows = {
        heading: dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", part, re.MULTILINE))
        for heading, part in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    }

    assert rows["Chat completions"] == dict(CHAT)
    assert rows["Responses"] == dict(RESPONSES)
    assert rows["Messages"] == dict(MESSAGES)


@pytest.mark.slow
def test_the_tables_have_every_field_of_the_sdks_own_types():
    pytest.importorskip("anthropic")
    from anthropic.types import beta, message_create_params
    from openai.types.chat import completion_create_params
    from openai.types.responses import response_create_params

    fields = [
        (CHAT, completion_create_params.CompletionCreateParamsBase),
        (RESPONSES, response_create_params.ResponseCreateParamsBase),
        (MESSAGES, message_create_params.MessageCreateParamsBase),
        (MESSAGES, beta.message_create_params.MessageCreateParamsBase),
    ]

    missing = [
        (kind.__module__, name) for table, kind in fields for name in set(kind.__annotations__) - set(table)
    ]
    assert missing == []
