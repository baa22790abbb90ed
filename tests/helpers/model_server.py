"""A server that keeps vLLM's protocol, samples from a real small model, and takes new weights."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from agentenv.render import ChatTokenizer
from helpers.fake_vllm import FakeVLLM, in_a_thread, refusal


@dataclass
class ModelServer(FakeVLLM):
    """Samples each token with the seed of its request, so that equal requests have equal answers."""

    model: Any = None
    tokenizer: ChatTokenizer | None = None
    """Tokenizer of `/tokenize`; without one there is no such route."""
    adapted: dict[str, Any] = field(default_factory=dict)
    """Models with adapters, by the path of the adapter."""
    key: str = ""
    """Key without which paths below `/v1` and `/inference` are refused, as vLLM does with `--api-key`."""

    def app(self):
        app = super().app()
        app.middlewares.append(self.guard)
        if self.tokenizer is not None:
            app.router.add_post("/tokenize", self.tokenize)
        return app

    @web.middleware
    async def guard(self, request, handler):
        if (
            self.key
            and request.path.startswith(("/v1", "/inference"))
            and request.headers.get("Authorization") != f"Bearer {self.key}"
        ):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def tokenize(self, request):
        assert self.tokenizer is not None
        tokens = self.tokenizer.encode((await request.json())["prompt"])
        return web.json_response({"tokens": tokens, "count": len(tokens)})

    async def completions(self, request):
        """Score the prompt if `prompt_logprobs` asks for it, as vLLM does; `plan` holds faults."""
        body = await request.json()
        if body.get("prompt_logprobs") is None:
            return await super().completions(request)
        self.seen.append(body)
        fault = self.plan.pop(0) if self.plan else None
        if isinstance(fault, int):
            raise refusal(fault, f"fault {fault}")
        ids = list(body["prompt"])
        with torch.no_grad():
            logprobs = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        if fault == "other ids":
            ids = [*ids[:-1], ids[-1] + 1]
        scored: list[Any] = [
            {str(token): {"logprob": float(logprobs[place, token]), "rank": 1, "decoded_token": "x"}}
            for place, token in enumerate(ids[1:])
        ]
        choice = {"text": "x", "finish_reason": "length", "prompt_logprobs": [None, *scored]}
        return web.json_response({"choices": [{} if fault == "empty" else choice]})

    async def rpc(self, request):
        answer = await super().rpc(request)
        self.model = AutoModelForCausalLM.from_pretrained(self.weights).eval()
        return answer

    def model_of(self, name: str) -> Any:
        """Return the model with the adapter of this name, or the base model."""
        if name == "base":
            return self.model
        if name not in self.adapters:
            raise refusal(404, f"no model {name}")
        path = self.adapters[name]
        if path not in self.adapted:
            from peft import PeftModel

            self.adapted[path] = PeftModel.from_pretrained(copy.deepcopy(self.model), path).eval()
        return self.adapted[path]

    async def generate(self, request):
        body = await request.json()
        model = self.model_of(body["model"])
        drawn = body["sampling_params"]
        self.sampled.append((self.version, self.weights, dict(self.adapters)))
        self.seen.append(body)
        ids, tokens, entries = list(body["token_ids"]), [], []
        generator = torch.Generator().manual_seed(drawn.get("seed", 0) % 2**63)
        while len(tokens) < drawn["max_tokens"]:
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1].float()
            logprobs = (logits / (drawn["temperature"] or 1.0)).log_softmax(-1)
            token = int(logprobs.argmax())
            if drawn["temperature"]:
                token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
            best = logprobs.topk(5)
            top = [{"token_id": int(i), "logprob": float(p)} for p, i in zip(*best, strict=True)]
            entries.append({"token_id": token, "logprob": float(logprobs[token]), "top_logprobs": top})
            ids.append(token)
            tokens.append(token)
            if token in drawn.get("stop_token_ids", ()):
                break
        stopped = tokens[-1] in drawn.get("stop_token_ids", ())
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": entries},
            "finish_reason": "stop" if stopped else "length",
            "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
        }
        return web.json_response({"choices": [choice]})


@contextmanager
def model_server(path: str, **options: Any) -> Generator[ModelServer]:
    """Serve the model of a directory from a thread, and yield the server."""
    server = ModelServer(model_path=path, max_model_len=512, **options)
    server.model = AutoModelForCausalLM.from_pretrained(path).eval()
    with in_a_thread(server):
        yield server
