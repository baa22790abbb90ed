"""A loopback server that keeps vLLM's protocol, faults included, and engines on it."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import re
import threading
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from aiohttp import web

from agentenv.engine import Sampling, VLLMServerEngine
from agentenv.engine.vllm import connect, probe

STOP = 7
ROUTES = pytest.mark.parametrize("route", ["generate", "completions"])


def cut(table: dict[int, float], drawn: dict) -> dict[int, float]:
    """Return the logprobs of the tokens that top-k and top-p leave, renormalised over these."""
    left, before = {}, 0.0
    for token in sorted(table, key=table.get, reverse=True)[: drawn.get("top_k") or None]:
        if before < drawn.get("top_p", 1):
            left[token] = table[token]
        before += math.exp(table[token])
    if len(left) == len(table):
        return dict(table)
    total = math.log(sum(map(math.exp, left.values())))
    return {token: value - total for token, value in left.items()}


def likeliest(table: dict[int, float], drawn: dict) -> list[int]:
    return sorted(table, key=table.get, reverse=True)[: drawn.get("logprobs") or 5]


@dataclass
class FakeVLLM:
    """Answers as vLLM does; `plan` holds faults to play, one for each generation."""

    route: str = "generate"
    scaled: bool = True
    token_ids: bool = True
    pausable: bool = True
    torn: str = ""
    """Path of weights that cannot be loaded."""
    stale: str = ""
    """Path of weights of which an older file is read."""
    hardware: str = ""
    """What the checksums depend on beside the weights."""
    loads: asyncio.Event | None = None
    """Set to let the server load weights."""
    dies_of: str = ""
    """Path of weights while loading which the connection breaks."""
    streams: bool | None = True
    """Whether completions are streamed on request; False ignores the request, None refuses it."""
    experts: bool = False
    """Whether it tells to which experts it sent the tokens, of 3 layers with 2 choices each."""
    grammars: bool = False
    """Whether it samples by a grammar, which names the ids of the completion."""
    max_model_len: int = 64
    max_logprobs: int = 20
    model_path: str = "/srv/model"
    metrics: str = ""
    """What `/metrics` answers; a server without metrics has no such route."""
    plan: list[object] = field(default_factory=list)
    seen: list[dict] = field(default_factory=list)
    sessions: list[str | None] = field(default_factory=list)
    """The session header of each generation."""
    posts: list[str] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    version: str = "default"
    weights: str = "start"
    dropped: int = 0
    running: int = 0
    sampled: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """Label, weights and adapters of each completion."""
    gate: asyncio.Event | None = None
    """Set to let the completions go on."""
    shift: int = 0
    """What is added to the likeliest tokens, as in another model."""
    asked: int = 0
    """Number of requests that arrived."""
    frozen: asyncio.Event | None = None
    """Set to let a server go on that answers nothing at all."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    placeholder: int = -1
    """The id that stands for an image; -1 for a model that sees none."""
    tokens_of: object = None
    """Returns how many placeholders the image of a data URL becomes."""
    tells_prompt: bool = True
    """Whether it tells the ids that it made of a prompt with images."""
    url: str = ""
    runner: web.AppRunner | None = None

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.freeze])
        routes = {
            "/v1/completions": self.completions,
            "/collective_rpc": self.rpc,
            "/update_weight_version": self.set_version,
            "/v1/load_lora_adapter": self.lora,
            "/v1/unload_lora_adapter": self.unload,
            "/weight_checker": self.checker,
            "/reset_prefix_cache": self.note({"success": True}),
            "/pause": self.note({"status": "paused"}),
            "/resume": self.note({"status": "resumed"}),
        }
        if not self.pausable:
            routes["/pause"] = self.refuse
        if self.route == "generate":
            routes["/inference/v1/generate"] = self.generate
        for path, handler in routes.items():
            app.router.add_post(path, handler)
        told = {
            "/openapi.json": self.note({"paths": {path: {} for path in [*routes, "/weight_info"]}}),
            "/version": self.note({"version": "0.32.0"}),
            "/health": self.note({}),
            "/weight_info": self.info,
            "/v1/models": self.models,
        }
        for path, handler in (told | ({"/metrics": self.tell_metrics} if self.metrics else {})).items():
            app.router.add_get(path, handler)
        return app

    @web.middleware
    async def freeze(self, request, handler):
        self.asked += 1
        if self.frozen is not None:
            await self.frozen.wait()
        return await handler(request)

    async def models(self, _):
        base = {"id": "base", "root": self.model_path, "max_model_len": self.max_model_len}
        return web.json_response(
            {"data": [base, *({"id": name, "parent": "base"} for name in self.adapters)]}
        )

    async def tell_metrics(self, _):
        return web.Response(text=self.metrics)

    async def info(self, _):
        return web.json_response({"weight_version": self.version})

    def note(self, answer):
        async def handler(request):
            if request.method == "POST":
                self.posts.append(request.path_qs)
            return web.json_response(answer)

        return handler

    async def refuse(self, _):
        return web.json_response({"error": {"message": "not now"}}, status=400)

    async def rpc(self, request):
        body = await request.json()
        self.posts.append(body["method"])
        path = body["kwargs"]["weights_path"]
        if path == self.torn:
            self.weights = "half of " + path
            return web.json_response({"error": {"message": "a tensor is missing"}}, status=500)
        if self.loads is not None:
            await self.loads.wait()
        if path == self.dies_of:
            self.dies_of = ""
            request.transport.close()
        self.weights = body["kwargs"]["weights_path"]
        if path == self.stale:
            self.weights = "an older " + path
        return web.json_response({"results": [None]})

    async def checker(self, _):
        return web.json_response({"checksums": {"embed": "1", "head": self.weights + self.hardware}})

    async def set_version(self, request):
        self.version = (await request.json())["new_version"]
        self.posts.append(self.version)
        return web.json_response({"success": True})

    async def lora(self, request):
        body = await request.json()
        if body["lora_name"] in self.adapters and not body.get("load_inplace"):
            return web.json_response({"error": {"message": "already loaded"}}, status=400)
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.Response(text="Success")

    async def unload(self, request):
        if self.adapters.pop((await request.json())["lora_name"], None) is None:
            return web.json_response({"error": {"message": "not found"}}, status=404)
        return web.Response(text="Success")

    async def count(self, change):
        self.running += change
        async with self.changed:
            self.changed.notify_all()

    async def until(self, running):
        """Wait until so many requests are being answered."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.running == running)

    async def sample(self, request, body, prompt, drawn):
        """Return tokens and top logprobs of a fixed toy model, or play a fault."""
        grammar = drawn.get("structured_outputs", {}).get("grammar", "")
        if not self.grammars and grammar:  # as servers do that do not know it
            return [11], {11: -0.5}, "length", None
        if "(" in grammar and ")" not in grammar:
            raise refusal(400, "Grammar error: Expected token ')', found the end")
        if grammar:
            tokens = [int(token) for token in re.findall(r"<\[(\d+)\]>", grammar)]
            # The end comes last, and stands first.
            tokens = [*tokens[1:], *tokens[:1]]
            self.seen += [body] if drawn["max_tokens"] > 1 else []
            return tokens, dict.fromkeys(tokens, 0.0), "stop" if tokens[-1] == STOP else "length", None
        self.seen.append(body)
        self.sessions.append(request.headers.get("x-session-id"))
        fault = self.plan.pop(0) if self.plan else None
        await self.count(1)
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.dropped += 1
            raise
        finally:
            await self.count(-1)
        if isinstance(fault, int):
            raise refusal(fault, f"fault {fault}")
        if fault == "close":
            request.transport.close()
        if body["model"] != "base" and body["model"] not in self.adapters:
            raise refusal(404, f"no model {body['model']}")
        if len(prompt) + drawn["max_tokens"] > self.max_model_len:
            raise refusal(400, f"This model's maximum context length is {self.max_model_len} tokens.")
        if (asked := drawn.get("logprobs") or 0) > self.max_logprobs:
            most = f"which is greater than max allowed: {self.max_logprobs}"
            raise refusal(400, f"Requested sample logprobs of {asked}, {most}")
        self.sampled.append((self.version, self.weights, dict(self.adapters)))
        heat = drawn["temperature"] if self.scaled else 1.0
        logits = [
            math.sin((token + self.shift) * 3 + len(prompt)) * 2 / (heat or 1.0) for token in range(10, 40)
        ]
        total = math.log(sum(map(math.exp, logits)))
        table = {token: value - total for token, value in zip(range(10, 40), logits, strict=True)}
        left = cut(table, drawn)
        random = Random(drawn.get("seed"))
        tokens = [random.choice(list(left)) for _ in range(drawn["max_tokens"])]
        if drawn["stop_token_ids" if "stop_token_ids" in drawn else "max_tokens"] == [STOP]:
            tokens = [*tokens[: drawn["max_tokens"] - 1], STOP]
        if left == table:
            table[STOP] = -3.0
        else:  # what is cut has a probability of 0, for which JSON has no logarithm
            table = dict.fromkeys(table, -9999.0) | left
        return tokens, table, "stop" if tokens[-1] == STOP else "length", fault

    async def generate(self, request):
        body = await request.json()
        drawn = body["sampling_params"]
        prompt = self.expanded(body["token_ids"], body.get("content_parts") or [])
        tokens, table, reason, fault = await self.sample(request, body, prompt, drawn)
        top = likeliest(table, drawn)
        content = [
            {
                "token_id": t,
                "logprob": table[t],
                "top_logprobs": [{"token_id": o, "logprob": table[o]} for o in top],
            }
            for t in tokens
        ]
        spans = [{"version": self.version, "start": 0, "end": len(tokens)}]
        choice = {"token_ids": tokens, "logprobs": {"content": content}, "finish_reason": reason}
        choice |= {"weight_versions": spans, "routed_experts": self.told(len(prompt) + len(tokens) - 1)}
        return await self.reply(request, body, choice, fault, prompt)

    def expanded(self, ids, parts):
        """Return the ids with images: each replaces the next placeholder, whoever wrote it."""
        left, out = list(parts), []
        for token in ids:
            count = self.tokens_of(left.pop(0)["url"]) if token == self.placeholder and left else 1
            out += [token] * count
        return out

    async def completions(self, request):
        body = await request.json()
        if not self.token_ids:
            return web.json_response({"choices": [{"text": "hi", "finish_reason": "stop", "logprobs": None}]})
        tokens, table, reason, fault = await self.sample(request, body, body["prompt"], body)
        top = likeliest(table, body)
        logprobs = {
            "token_logprobs": [table[token] for token in tokens],
            "top_logprobs": [{f"token_id:{other}": table[other] for other in top} for _ in tokens],
        }
        choice = {"token_ids": tokens, "logprobs": logprobs, "finish_reason": reason}
        choice["prompt_token_ids"] = body["prompt"]
        choice["routed_experts"] = self.told(len(body["prompt"]) + len(tokens) - 1)
        return await self.reply(request, body, choice, fault)

    def told(self, tokens):
        """Return the experts of so many tokens as vLLM sends them: a .npy file in base64."""
        if not self.experts:
            return None
        file = io.BytesIO()
        np.save(file, experts_of(tokens), allow_pickle=False)
        return base64.b64encode(file.getbuffer()).decode()

    async def reply(self, request, body, choice, fault, prompt=None):
        if body.get("stream") and self.streams:
            return await self.stream(request, choice, fault)
        if body.get("stream") and self.streams is None:
            return web.json_response({"error": {"message": "streaming is not supported"}}, status=400)
        if fault == "nonsense":
            return web.Response(text="<html>")
        if fault == "short":
            choice["token_ids"] = choice["token_ids"][:-1]
        if fault == "stopped":  # as by a stop string
            choice["token_ids"][-1] = choice["token_ids"][0]
            choice["finish_reason"] = "stop"
        if fault == "infinite":
            choice["logprobs"] = {"token_logprobs": [-9999.0] * len(choice["token_ids"]), "content": []}
            choice["logprobs"]["content"] = [{"logprob": -9999.0}] * len(choice["token_ids"])
        if fault == "empty":
            choice = {}
        told = {"prompt_token_ids": prompt} if body.get("return_token_ids") and self.tells_prompt else {}
        return web.json_response({"choices": [choice], **told})

    async def stream(self, request, choice, fault):
        """Send each token in an event of its own; the answer names no weights."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        last = len(choice["token_ids"]) - 1
        for index, token in enumerate(choice["token_ids"]):
            if fault == "breaks" and index == 2:
                request.transport.close()
                return response
            if fault == "fails" and index == 2:
                await response.write(b'data: {"error": {"message": "out of memory", "code": 500}}\n\n')
                break
            logprobs = {name: values[index : index + 1] for name, values in choice["logprobs"].items()}
            chunk = {"index": 0, "token_ids": [token], "logprobs": logprobs, "finish_reason": None}
            if index == last and fault != "no end":
                chunk["finish_reason"] = choice["finish_reason"]
                if self.route == "generate":  # vLLM streams them through this route only
                    chunk["routed_experts"] = choice["routed_experts"]
            data = json.dumps({"choices": [chunk]}).encode()
            # The bytes of an event may arrive in several parts.
            await response.write(b"data: " + data[:20])
            await response.write(data[20:] + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def start(self, port=0):
        self.runner = web.AppRunner(self.app(), shutdown_timeout=0.1, handler_cancellation=True)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def stop(self):
        await self.runner.cleanup()

    def forget(self):
        """Have the state of a server that was just started."""
        self.adapters, self.version, self.weights, self.gate = {}, "default", "start", None

    async def come_back(self):
        """Start again, at the same address."""
        self.forget()
        await self.start(int(self.url.rsplit(":", 1)[1]))


def experts_of(tokens):
    """Return the experts that a fake server tells of so many tokens, `[tokens, layers, choices]`."""
    return (np.arange(tokens)[:, None, None] + np.arange(6).reshape(3, 2)).astype("uint8")


def cache_metrics(*engines: dict[str, object]) -> str:
    """Return the text of `/metrics` of a server, with the labels of the cache of each of its engines."""
    lines = ["# TYPE vllm:cache_config_info gauge"]
    for number, labels in enumerate(engines):
        told = {"cache_dtype": "auto", "engine": number, "gpu_memory_utilization": 0.92, **labels}
        lines.append(
            "vllm:cache_config_info{"
            + ",".join(f'{name}="{value}"' for name, value in told.items())
            + "} 1.0"
        )
    return "\n".join([*lines, 'vllm:num_requests_running{engine="0",model_name="base"} 0.0', ""])


FAULTS = {
    400: web.HTTPBadRequest,
    404: web.HTTPNotFound,
    429: web.HTTPTooManyRequests,
    500: web.HTTPInternalServerError,
    503: web.HTTPServiceUnavailable,
}


def refusal(status, said):
    return FAULTS[status](text=json.dumps({"error": {"message": said, "code": status}}))


@asynccontextmanager
async def serving(**kwargs):
    fake = FakeVLLM(**kwargs)
    await fake.start()
    try:
        yield fake
    finally:
        await fake.stop()


@asynccontextmanager
async def engine_on(*fakes, **options):
    report = await asyncio.to_thread(probe, fakes[0].url)
    for fake in fakes:
        fake.seen.clear()
        fake.sampled.clear()
    engine = VLLMServerEngine(report, [fake.url for fake in fakes], **options)
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def connected(*urls, **options):
    """Connect to servers by their addresses, as a run does, and yield the engine."""
    engine, _ = await asyncio.to_thread(connect, ",".join(urls), tokenizer="x", **options)
    try:
        yield engine
    finally:
        await engine.close()


@contextmanager
def in_a_thread(*servers):
    """Serve from a thread, for tests that have no event loop of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fake servers")
    thread.start()
    try:
        for server in servers:
            asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        yield
        for server in servers:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def say(engine, prompt=(1, 2, 3), session=None, deadline_s=None, stop=(), **sampling):
    drawn = Sampling(**{"max_tokens": 4, "seed": 0} | sampling)
    return await engine.generate(
        prompt, drawn, stop_token_ids=stop, session_id=session, deadline_s=deadline_s
    )
