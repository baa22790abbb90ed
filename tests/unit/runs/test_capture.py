"""A server for agents that run elsewhere: sessions, rewards by one call, and what is written."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp

from agentenv.core import RunLimits, StopReason
from agentenv.core.serving import Guard
from agentenv.engine import ScriptedEngine
from agentenv.engine.forms import LoadedModel
from agentenv.runs import CaptureServer, Run, RunWriter, capture_agents
from helpers.agents import ADD, TOKENIZER, by_turn, call

TURNS = by_turn(call('{"a": 2, "b": 3}'), "It is 5.")


@asynccontextmanager
async def captured(tmp_path, **options):
    model = LoadedModel(ScriptedEngine(TURNS, tokenizer=TOKENIZER), TOKENIZER)
    with RunWriter.create("capture/Agent-v0", runs_dir=tmp_path, env_ids=("capture/Agent-v0",)) as writer:
        async with (
            capture_agents(model, writer, Guard(), **options) as served,
            aiohttp.ClientSession(served.url) as http,
        ):
            yield SimpleNamespace(
                served=served, http=http, writer=writer, engine=model.engine, headers=served.headers
            )


async def post(server, path, body, *, status=200, headers=None):
    headers = server.headers if headers is None else headers
    async with server.http.post(path, json=body, headers=headers) as got:
        assert got.status == status, await got.text()
        return await got.json()


async def converse(server, url):
    """Play the agent: two requests, with any key."""
    path, messages = url.removeprefix(server.served.url), [{"role": "user", "content": "2+3?"}]
    key = {"Authorization": "Bearer any"}
    while True:
        body = {"model": "m", "messages": messages, "tools": [ADD]}
        said = await post(server, f"{path}/chat/completions", body, headers=key)
        message = said["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return message["content"]
        messages += [
            {"role": "tool", "tool_call_id": made["id"], "content": "5"} for made in message["tool_calls"]
        ]


async def test_an_agent_elsewhere_is_recorded_with_the_reward_that_was_reported(tmp_path):
    async with captured(tmp_path) as server:
        for reward in (1.0, 0.0):
            opened = await post(server, "/sessions", {"task": {"x": 2}})
            await converse(server, opened["openai_base_url"])
            end = opened["end"].removeprefix(server.served.url)
            told = await post(server, end, {"reward": reward})
            assert (told["turns"], told["sequences"], told["trainable"]) == (2, 1, True)
            assert told["trained_tokens"] == told["sampled_tokens"]
        path = server.writer.path

    records = list(Run(path))
    assert [(record.member, record.reward) for record in records] == [(0, 1.0), (1, 0.0)]
    assert len({record.group_id for record in records}) == 1
    assert records[0].task == {"x": 2}
    assert {record.stop_reason for record in records} == {StopReason.FINAL_ANSWER}
    assert records[0].turns[-1].reward == 1.0


async def test_only_who_has_the_token_opens_and_ends_sessions(tmp_path):
    async with captured(tmp_path) as server:
        await post(server, "/sessions", {}, status=401, headers={})
        await post(server, "/sessions", {}, status=401, headers={"Authorization": "Bearer any"})
        opened = await post(server, "/sessions", {})
        end = opened["end"].removeprefix(server.served.url)
        await post(server, end, {"reward": 1.0}, status=401, headers={"Authorization": "Bearer any"})
        await post(server, end, {"reward": "much"}, status=422)
        await post(server, end, {"reward": None})
        await post(server, end, {"reward": 1.0}, status=404)
        await post(server, "/sessions", {"task": 3}, status=422)


async def test_a_session_that_nobody_ends_is_recorded_as_aborted(tmp_path):
    async with captured(tmp_path) as server:
        opened = await post(server, "/sessions", {})
        await converse(server, opened["openai_base_url"])
        path = server.writer.path

    (record,) = Run(path)
    assert record.stop_reason is StopReason.ABORTED
    assert len(record.turns) == 2
    assert not record.trainable


async def test_an_idle_session_ends(tmp_path):
    model = LoadedModel(ScriptedEngine(TURNS, tokenizer=TOKENIZER), TOKENIZER)
    with RunWriter.create("capture/Agent-v0", runs_dir=tmp_path) as writer:
        server = CaptureServer(model, writer, Guard(), idle_s=0.0, limits=RunLimits())
        opened = _session(server, model)
        server._open[server._endpoint.open(opened.session)] = opened
        await server.look()

        assert [summary.stop_reason for summary in writer.summaries] == [StopReason.ABORTED]


def _session(server, model):
    from agentenv.core import Task
    from agentenv.endpoint import Session
    from agentenv.runs.capture import _OpenSession

    return _OpenSession(Session(model.engine, server._renderer), Task.of({}), 0, used=-1.0)
