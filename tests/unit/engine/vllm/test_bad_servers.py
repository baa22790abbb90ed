"""Servers that are not what they should be: one clear error each, at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agentenv.core import EngineError, EngineUnavailable, ModelNotFound, UsageError
from agentenv.engine import Sampling, VLLMServerEngine, load_engine
from agentenv.engine.factory import weights_and_engine
from agentenv.engine.vllm import ServerReport
from agentenv.engine.vllm.probe import probe
from helpers.servers import http_server

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

    async with http_server(handle) as url:
        yield url


NOT_OURS = "is not an OpenAI-compatible server: "


@pytest.mark.parametrize(
    ("routes", "path", "said"),
    [
        ({}, "/v1", NOT_OURS + "/v1/models answered with status 404: Not Found"),
        ({"/v1/models": "<html>"}, "/v1", NOT_OURS + "the answer of /v1/models is not JSON"),
        ({"/v1/models": ["m"]}, "/v1", NOT_OURS + "/v1/models answered"),
        ({"/v1/models": {"data": []}}, "/v1", "serves no model"),
        ({"/v1/models": model()}, "/elsewhere/v1", "not an OpenAI-compatible server"),
    ],
    ids=["404", "html", "list", "none", "path"],
)
async def test_what_is_no_model_server_is_said(routes, path, said):
    async with answering(routes) as url:
        with pytest.raises(EngineError, match=said) as caught:
            await asyncio.to_thread(load_engine, url + path)
    assert "\n" not in str(caught.value)


def head(length: int, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (head(100) + b"{", "is not JSON"),
        (head(100, "500 No") + b"{", "status 500: {"),
        (b"\x1b]0;mine\x07 hello\r\n\r\n", "breaks the rules of HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", "breaks the rules of HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "breaks the rules of HTTP"),
        (head(200_000) + b"[" * 200_000, "is not JSON"),
        (head(10**12) + b"[" * 40_000_000, "more than 32,000,000 bytes"),
        (head(26) + b'{"data": [{"id": [1, 2]}]}', "not an OpenAI-compatible server"),
    ],
    ids=["short", "short 500", "status line", "headers", "chunks", "deep", "endless", "id"],
)
async def test_what_a_server_sends_is_told_in_our_words(sent, said):
    async def send(reader, writer):
        with contextlib.suppress(OSError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(sent)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(send, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        with pytest.raises(EngineError, match=said) as caught:
            await asyncio.to_thread(load_engine, url)

    assert caught.value.__cause__ is None
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, "long", -math.inf, 10**400, [], {"a": 1}])
async def test_odd_numbers_of_a_server_are_not_taken(value):
    top = {"token_id:3": value, "token_id:4": -1.5}
    token = {"choices": [{"token_ids": [3], "logprobs": {"top_logprobs": [top]}}]}
    routes = {
        "/v1/models": {"data": [{"id": "m", "root": value, "parent": value, "max_model_len": value}]},
        "/v1/completions": token,
        "/metrics": f'vllm:cache_config_info{{kv_cache_size_tokens="{str(value)[:200]}"}} 1',
    }
    async with answering(routes) as url:
        report = await asyncio.to_thread(probe, url)

    assert report.logprobs == "unknown"
    assert report.max_context_tokens is None


async def test_a_wrong_model_name_is_told_the_right_ones():
    async with answering({"/v1/models": model()}) as url:
        with pytest.raises(EngineError, match="no model 'other'; use one of its models: m"):
            await asyncio.to_thread(load_engine, f"{url}/v1", model="other")


async def test_a_server_that_returns_no_token_ids_is_played_as_a_chat_api():
    async with answering({"/v1/models": model(), "/v1/completions": {}}) as url:
        with pytest.warns(UserWarning, match="evaluated but not trained on"):
            loaded = await asyncio.to_thread(load_engine, f"{url}/v1")

    assert (type(loaded.engine).__name__, loaded.tokenizer) == ("OpenAIChatEngine", None)
    assert loaded.engine.name == f"{url}/v1"


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
