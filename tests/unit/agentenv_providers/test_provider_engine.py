"""Providers' own APIs, played by faithful fakes: tools, thinking with its signature, limits, filters and prices."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial

import pytest
from aiohttp import web

from agentenv.core import ContextTooLong, EngineError, EngineUnavailable, RunLimits, UsageError
from agentenv.engine import Sampling, load_engine
from agentenv.runner import Runner
from field.apis import SUM, Adder
from helpers.agents import call, served
from helpers.servers import planned

pytest.importorskip("pydantic_ai")
# The packages of the providers warn of what is not ours.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

ARGUMENTS = {"a": 2, "b": 3}
TEXT = '{"a": 2, "b": 3}'
ASK = [{"role": "user", "content": "What is 2 + 3?"}]


def openai_like(body, *, second):
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": TEXT}}
    message = {
        "role": "assistant",
        "content": SUM if second else "",
        "tool_calls": None if second else [call],
    }
    choice = {"index": 0, "message": message, "finish_reason": "stop" if second else "tool_calls"}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    head = {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"]}
    return {**head, "choices": [choice], "usage": usage}


def anthropic(body):
    blocks = [
        block for one in body["messages"] if isinstance(one["content"], list) for block in one["content"]
    ]
    second = any(block["type"] == "tool_result" for block in blocks)
    signatures = [block["signature"] for block in blocks if block["type"] == "thinking"]
    if second and signatures != ["c2ln"]:
        return {"type": "error", "error": {"type": "invalid_request_error", "message": "no signature"}}
    thought = {"type": "thinking", "thinking": "Two and three.", "signature": "c2ln"}
    use = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": ARGUMENTS}
    usage = {"input_tokens": 10, "output_tokens": 5, "cache_read_input_tokens": 4}
    head = {"id": "m", "type": "message", "role": "assistant", "model": body["model"], "stop_sequence": None}
    content = [{"type": "text", "text": SUM}] if second else [thought, use]
    return {**head, "content": content, "stop_reason": "end_turn" if second else "tool_use", "usage": usage}


def google(body):
    parts = [part for one in body["contents"] for part in one["parts"]]
    second = any("functionResponse" in part for part in parts)
    if second and [part["thoughtSignature"] for part in parts if "functionCall" in part] != ["c2ln"]:
        return {"error": {"code": 400, "message": "no signature", "status": "INVALID_ARGUMENT"}}
    made = {"functionCall": {"name": "add", "args": ARGUMENTS}, "thoughtSignature": "c2ln"}
    content = {"role": "model", "parts": [{"text": SUM}] if second else [made]}
    usage = {"promptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 15}
    return {"candidates": [{"content": content, "finishReason": "STOP", "index": 0}], "usageMetadata": usage}


def bedrock(body):
    second = any("toolResult" in block for one in body["messages"] for block in one["content"])
    use = {"toolUse": {"toolUseId": "t1", "name": "add", "input": ARGUMENTS}}
    message = {"role": "assistant", "content": [{"text": SUM}] if second else [use]}
    usage = {"inputTokens": 10, "outputTokens": 5, "totalTokens": 15}
    reason = "end_turn" if second else "tool_use"
    return {"output": {"message": message}, "stopReason": reason, "usage": usage, "metrics": {"latencyMs": 1}}


def chat(body):
    return openai_like(body, second=any(one["role"] == "tool" for one in body["messages"]))


APIS = {"anthropic": anthropic, "google": google, "mistral": chat, "groq": chat, "bedrock": bedrock}
MODELS = {
    "anthropic": "claude-sonnet-4-5",
    "google": "gemini-2.5-pro",
    "mistral": "mistral-large-latest",
    "groq": "qwen/qwen3-32b",
    "bedrock": "us.amazon.nova-pro-v1:0",
}
AWS = {"region_name": "us-east-1", "aws_access_key_id": "x", "aws_secret_access_key": "y"}


@asynccontextmanager
async def engine_at(provider, *plan, **options):
    """Serve a provider's API; planned responses come before its own answers."""

    def answer(body):
        said = APIS[provider](body)
        return partial(web.json_response, said, status=400 if "error" in said else 200)

    async with planned(*plan, then=answer) as api:
        bedrock = provider == "bedrock"
        key = {"provider_options": AWS} if bedrock else {"api_key": "k"}
        settings = {} if bedrock else {"max_retries": 0}
        model = f"{provider}:{MODELS[provider]}"
        engine = load_engine(model, **{"base_url": api.url, "settings": settings} | key | options).engine
        try:
            yield engine, api.bodies
        finally:
            await engine.close()


@pytest.mark.parametrize("provider", APIS)
async def test_an_episode_with_a_tool_is_played_scored_and_priced(provider):
    async with engine_at(provider) as (engine, _):
        episode = await Runner(engine, None, RunLimits(max_turns=4)).run_episode(Adder(), {})

    assert episode.error is None, episode.error
    assert (episode.reward, episode.answer, len(episode.turns)) == (1.0, SUM, 2)
    assert episode.metrics["completion_tokens"] == 10
    assert episode.metrics["cost_usd"] > 0
    assert episode.metrics["cached_tokens"] == (8 if provider == "anthropic" else 0)


async def test_claude_is_spoken_to_as_our_own_endpoint_speaks():
    turns = [call(TEXT), "It is 5."]
    async with served(turns) as agent:
        engine = load_engine("anthropic:claude-sonnet-4-5", base_url=agent.url, api_key="k").engine
        tools = [
            {
                "type": "function",
                "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
            }
        ]
        first = await engine.chat(ASK, tools, Sampling(max_tokens=500))
        (made,) = first.message["tool_calls"]
        told = [*ASK, first.message, {"role": "tool", "tool_call_id": made["id"], "content": "5"}]
        last = await engine.chat(told, tools, Sampling(max_tokens=500))
        await engine.close()

    assert made["function"]["name"] == "add"
    assert (last.message["content"], last.finish_reason) == ("It is 5.", "stop")


async def test_images_and_results_reach_the_provider():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    asked = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, image]},
    ]
    async with engine_at("anthropic") as (engine, seen):
        await engine.chat(asked, [], Sampling())

    kinds = [block["type"] for block in seen[0]["messages"][0]["content"]]
    assert kinds == ["text", "image"]
    assert "Look." in str(seen[0]["system"])


def refusal(status, kind, message, **headers):
    body = {"type": "error", "error": {"type": kind, "message": message}}
    return partial(web.json_response, body, status=status, headers=headers)


async def test_a_limit_of_rate_is_waited_for():
    busy = refusal(429, "rate_limit_error", "slow down", **{"retry-after": "0"})
    async with engine_at("anthropic", busy) as (engine, seen):
        done = await engine.chat(ASK, [], Sampling())

    assert (done.finish_reason, len(seen)) == ("stop", 2)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (
            refusal(400, "invalid_request_error", "prompt is too long: 300000 tokens > 200000 maximum"),
            ContextTooLong,
        ),
        (refusal(401, "authentication_error", "invalid x-api-key"), EngineError),
        (refusal(529, "overloaded_error", "Overloaded"), EngineUnavailable),
    ],
)
async def test_errors_are_told_by_what_they_mean(reply, error):
    async with engine_at("anthropic", reply, retry_s=0) as (engine, _):
        with pytest.raises(error) as caught:
            await engine.chat(ASK, [], Sampling())

    assert type(caught.value) is error


async def test_a_refusal_of_a_classifier_is_an_outcome():
    said = {**anthropic({"messages": [], "model": "m"}), "content": [], "stop_reason": "refusal"}
    async with engine_at("anthropic", web.json_response(said)) as (engine, _):
        episode = await Runner(engine, None, RunLimits(max_turns=4)).run_episode(Adder(), {})

    assert (episode.stop_reason.value, episode.reward) == ("content_filter", 0.0)


def test_a_missing_key_and_an_unknown_provider_are_said(monkeypatch):
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with pytest.raises(UsageError, match="ANTHROPIC_API_KEY"):
        load_engine("anthropic:claude-sonnet-4-5")
    with pytest.raises(UsageError, match="nobody"):
        load_engine("pydantic:nobody:m")
