"""Servers that are not what they should be: one clear error each, at once."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agentenv.core import EngineError, EngineUnavailable, ModelNotFound, UsageError
from agentenv.engine import Sampling, VLLMServerEngine, load_engine
from agentenv.engine.factory import weights_and_engine
from agentenv.engine.vllm import ServerReport

TOKEN = {"token_ids": [3], "logprobs": {"top_logprobs": [{"token_id:3": -0.5, "token_id:4": -1.5}]}}


def model(**more):
    return {"data": [{"id": "m", "max_model_len": 64, **more}]}


@asynccontextmanager
async def answering(routes):
    """Serve what each path answers: JSON, text as it is, or a handler."""

    async def handle(request):
        planned = routes.get(request.path)
        if planned is None:
            raise web.HTTPNotFound(text=json.dumps({"detail": "Not Found"}))
        if callable(planned):
            return await planned(request)
        return web.Response(text=planned if isinstance(planned, str) else json.dumps(planned))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        ({}, "is not an OpenAI-compatible server: /v1/models answered with status 404: Not Found"),
        (
            {"/v1/models": "<html>"},
            "is not an OpenAI-compatible server: the answer of /v1/models is not JSON",
        ),
        ({"/v1/models": ["m"]}, "is not an OpenAI-compatible server: /v1/models answered"),
        ({"/v1/models": {"data": []}}, "serves no model"),
    ],
    ids=["404", "html", "list", "none"],
)
async def test_what_is_no_model_server_is_said(routes, said):
    async with answering(routes) as url:
        with pytest.raises(EngineError, match=said) as caught:
            await asyncio.to_thread(load_engine, f"{url}/v1")
    assert "\n" not in str(caught.value)


async def test_a_wrong_path_is_said():
    async with answering({"/v1/models": model()}) as url:
        with pytest.raises(EngineError, match="not an OpenAI-compatible server"):
            await asyncio.to_thread(load_engine, f"{url}/elsewhere/v1")


async def test_a_wrong_model_name_is_told_the_right_ones():
    async with answering({"/v1/models": model()}) as url:
        with pytest.raises(EngineError, match="no model 'other'; use one of its models: m"):
            await asyncio.to_thread(load_engine, f"{url}/v1", model="other")


async def test_a_model_directory_without_tokenizer_is_said(tmp_path):
    routes = {"/v1/models": model(root=str(tmp_path)), "/v1/completions": {"choices": [TOKEN]}}
    async with answering(routes) as url:
        with pytest.raises(ModelNotFound, match="no tokenizer"):
            await asyncio.to_thread(load_engine, f"{url}/v1")


async def test_a_trainer_is_told_at_once_what_a_server_lacks(tmp_path):
    async with answering({"/v1/models": model(root=str(tmp_path)), "/v1/completions": {}}) as url:
        with pytest.raises(UsageError, match="evaluated but not trained on, because it returns no token ids"):
            await asyncio.to_thread(weights_and_engine, url)
    routes = {"/v1/models": model(root="/elsewhere"), "/v1/completions": {"choices": [TOKEN]}}
    async with answering(routes) as url:
        with pytest.raises(ModelNotFound, match="-m PATH -o engine="):
            await asyncio.to_thread(weights_and_engine, url)
    routes["/v1/models"] = model(root=str(tmp_path))
    async with answering(routes) as url:
        assert await asyncio.to_thread(weights_and_engine, url) == (str(tmp_path), url)


@pytest.mark.parametrize(
    ("name", "parts"), [("hf:a/b", ("a/b", "")), ("a/b", ("a/b", "")), ("vllm:a/b", ("a/b", "vllm:a/b"))]
)
def test_a_trainers_model_string_names_weights_and_engine(name, parts):
    assert weights_and_engine(name) == parts


async def test_a_server_that_always_closes_in_mid_answer_is_given_up_in_time():
    async def closes(request):
        reply = web.StreamResponse(headers={"Content-Length": "100"})
        await reply.prepare(request)
        await reply.write(b'{"choices": [')
        request.transport.close()
        return reply

    async with answering({"/v1/completions": closes, "/health": {}}) as url:
        report = ServerReport(url, "1", "m", None, 64, "completions", "processed", dev_mode=False, lora=False)
        engine = VLLMServerEngine(report, retry_s=0.5)
        with pytest.raises(EngineUnavailable, match=r"cannot be reached|no server has answered"):
            await engine.generate([1], Sampling(max_tokens=1), stop_token_ids=())
        await engine.close()
