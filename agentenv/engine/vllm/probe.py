"""Find out what a server can do: routes, token ids, scale of log-probabilities, LoRA adapters.

The requests are blocking, because a model string is resolved before any event loop runs.
"""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from http.client import HTTPConnection, HTTPException
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from agentenv.core.errors import EngineError, EngineUnavailable
from agentenv.core.visible import logger
from agentenv.engine.answers import message_of
from agentenv.engine.labels import Label
from agentenv.engine.reach import require_no_password
from agentenv.engine.vllm.grammars import grammar_of

__all__ = ["Asker", "LogprobScale", "ServerReport", "probe"]

LogprobScale = Literal["processed", "raw", "unknown"]
_log = logger(__name__)

PROBE_IDS = (5, 9, 14, 20, 27, 35)
"""Prompt of the probe; any ids will do that every vocabulary has."""
ONLY = 100
"""Token that a grammar leaves in a probe."""
TOP = 5
"""Number of likeliest tokens whose log-probabilities are compared."""
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_NUMBER = re.compile(r"[0-9]{1,15}")
QUICK_S = 20.0
"""Time limit in seconds of requests that do not sample."""
MOST_BYTES = 32_000_000
"""Most bytes of an answer that is read; whatever answers with more is no model server."""


@dataclass(frozen=True, slots=True)
class ServerReport:
    """The abilities of a server, as found by a probe."""

    url: str
    """Address without `/v1`."""
    version: str
    """Version of vLLM; "unknown" if the server does not say."""
    model: str
    """Name of the model in requests."""
    model_path: str | None
    """Path from which the server loaded the model, and where its tokenizer is; None if unknown."""
    max_context_tokens: int | None
    """Context limit of the server; None if unknown."""
    route: Literal["generate", "completions", "chat"]
    """Route for requests: `generate` and `completions` take token ids, `chat` takes only text."""
    logprobs: LogprobScale
    """Scale of the log-probabilities; `processed` means at the sampling temperature, as training needs."""
    dev_mode: bool
    """Whether the full weights can be changed over HTTP."""
    lora: bool
    """Whether adapters can be loaded while the server runs."""
    adapters: tuple[str, ...] = ()
    """Names of the loaded adapters."""
    base: str | None = None
    """Name of the base model in requests if `model` is an adapter; None if `model` is no adapter."""
    weights_label: str | None = None
    """Label of the present weights; None if the server stores none."""
    checksums: bool = False
    """Whether the server computes checksums of its weights."""
    cache_tokens: int | None = None
    """Number of tokens whose keys and values its cache holds; None if the server does not say."""
    experts: bool = False
    """Whether the server tells to which experts of a mixture it sent the tokens."""
    grammars: bool = False
    """Whether the server samples by grammars in Lark's form."""
    detail: str = ""
    """Why the server does not return token ids; empty if it does."""
    socket: str = ""
    """Path of the socket file on which the server listens; empty for the network."""
    top: Mapping[int, float] = field(default_factory=dict[int, float], compare=False, repr=False)
    """Log-probabilities of the likeliest tokens after a fixed prompt, by which models are told apart."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ServerReport:
        """Return the report whose fields went through JSON."""
        fields: dict[str, Any] = {**values, "adapters": tuple(values["adapters"])}
        fields["top"] = {int(token): value for token, value in values["top"].items()}
        return cls(**fields)

    @property
    def weights_version(self) -> int:
        """Version of the weights at the time of the probe if agentenv pushed them, else 0."""
        label = Label.read(self.weights_label)
        return 0 if label is None else label.version

    @property
    def missing(self) -> tuple[str, ...]:
        """The features that the server lacks for training, each with the flag that enables it."""
        lacks: list[str] = []
        if self.route == "chat":
            lacks.append(f"token ids: use a vLLM server of version 0.10.2 or later ({self.detail})")
        if self.logprobs != "processed":
            lacks.append(
                f"log-probabilities at the sampling temperature (they are {self.logprobs}): "
                "start it with --logprobs-mode processed_logprobs"
            )
        if self.route == "completions":
            lacks.append("the weights version of each token: start it with --enable-scale-out")
        if not self.lora:
            lacks.append("loading LoRAs: start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
        if not self.dev_mode:
            lacks.append("full weight updates: start it with VLLM_SERVER_DEV_MODE=1 (on a trusted network)")
        return tuple(lacks)


class _Probed(NamedTuple):
    """What a server answered when one token was sampled."""

    top: dict[int, float]
    """Log-probabilities of the likeliest tokens."""
    experts: bool
    """Whether it told the experts that the tokens were sent to."""


class Asker:
    """Sends blocking JSON requests to one server."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float, *, socket: str = "") -> None:
        self.url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._opener = _opener(socket)

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request (a POST if it has a body) and return the JSON answer.

        Raises:
            EngineUnavailable: The server cannot be reached.
            EngineError: The server refuses the request, or its answer is not JSON.
        """
        content = self.read(path, body)
        try:
            return from_json(content)
        except ValueError:  # also what is nested too deep
            raise EngineError(f"the answer of {path} is not JSON: {content[:80]!r}") from None

    def read(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Send a request and return the answer as it is.

        Raises:
            EngineUnavailable: The server cannot be reached.
            EngineError: The server refuses the request.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self._headers)  # noqa: S310
        try:
            limit = self._timeout_s if body is not None else min(self._timeout_s, QUICK_S)
            with self._opener.open(request, timeout=limit) as reply:
                content = reply.read(MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                try:
                    reason = _reason(error.read(MOST_BYTES))
                except (OSError, HTTPException):
                    reason = "the answer broke off"
            raise EngineError(f"{path} answered with status {error.code}: {reason}") from None
        except HTTPException as error:
            # The error holds what the server sent, which may be anything.
            raise EngineError(
                f"what answers at {self.url} breaks the rules of HTTP ({type(error).__name__})",
                remedy="check the address and the port",
            ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise EngineUnavailable(
                f"no server answers at {self.url}: {reason}",
                remedy="check the address, or start a server with `agentenv serve MODEL`",
            ) from None
        if len(content) > MOST_BYTES:
            raise EngineError(f"the answer of {path} has more than {MOST_BYTES:,} bytes")
        return content


class _OverSocket(urllib.request.HTTPHandler):
    """Opens addresses of http through a socket file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def http_open(self, req: urllib.request.Request) -> Any:
        """Send a request; the opener calls this."""
        path = self._path

        class Connection(HTTPConnection):
            def connect(self) -> None:
                self.sock = socket.socket(socket.AF_UNIX)
                self.sock.settimeout(self.timeout)
                self.sock.connect(path)

        return self.do_open(Connection, req)


@cache
def _opener(socket: str) -> urllib.request.OpenerDirector:
    others = [_OverSocket(socket)] if socket else []
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), *others)


def probe(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 180.0,
    socket: str = "",
) -> ServerReport:
    """Find out what a server can do.

    Args:
        url: address of the server, with or without `/v1`.
        model: name of the model on the server; the first model if None.
        api_key: key that is sent as a bearer token.
        timeout_s: time limit of requests that sample, of which the first may have to wait for compilation.
        socket: path of the socket file on which the server listens; empty for the network.

    Raises:
        EngineUnavailable: The server cannot be reached.
        EngineError: The server is not OpenAI-compatible, or does not have the model.
        UsageError: The address holds a password.
    """
    require_no_password(url)
    asker = Asker(url.rstrip("/").removesuffix("/v1"), api_key, timeout_s, socket=socket)
    served = _models(asker)
    chosen = served[0] if model is None else next((entry for entry in served if entry["id"] == model), None)
    if chosen is None:
        names = ", ".join(entry["id"] for entry in served)
        raise EngineError(
            f"the server {asker.url} has no model {model!r}", remedy=f"use one of its models: {names}"
        )
    paths = _paths(asker)
    route, scale, experts, top, detail = _token_route(asker, chosen["id"], paths)
    return ServerReport(
        url=asker.url,
        version=_version(asker),
        model=chosen["id"],
        model_path=chosen["root"] if isinstance(chosen.get("root"), str) else None,
        max_context_tokens=_length(chosen.get("max_model_len")),
        route=route,
        logprobs=scale,
        dev_mode="/collective_rpc" in paths,
        lora="/v1/load_lora_adapter" in paths,
        adapters=tuple(entry["id"] for entry in served if entry.get("parent")),
        base=chosen["parent"] if isinstance(chosen.get("parent"), str) else None,
        weights_label=_weights_label(asker) if "/weight_info" in paths else None,
        checksums="/weight_checker" in paths,
        cache_tokens=_cache_tokens(asker),
        experts=experts,
        grammars=_follows_grammars(asker, chosen["id"], route),
        detail=detail,
        socket=socket,
        top=top,
    )


def _length(said: object) -> int | None:
    return said if type(said) is int and 0 < said < 2**53 else None


def _models(asker: Asker) -> list[dict[str, Any]]:
    try:
        answer = asker.ask("/v1/models")
    except EngineUnavailable:
        raise
    except EngineError as error:
        raise EngineError(f"{asker.url} is not an OpenAI-compatible server: {error}") from None
    served = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(served, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("id"), str) for entry in served
    ):
        raise EngineError(
            f"{asker.url} is not an OpenAI-compatible server: /v1/models answered {str(answer)[:80]}"
        )
    if not served:
        raise EngineError(f"the server {asker.url} serves no model")
    return served


def _paths(asker: Asker) -> set[str]:
    """Return the routes that a server lists; the set is empty if it lists none."""
    try:
        answer = asker.ask("/openapi.json")
    except EngineError:
        return set()
    paths = answer.get("paths") if isinstance(answer, dict) else None
    return set(paths) if isinstance(paths, dict) else set()


def _weights_label(asker: Asker) -> str | None:
    answer = asker.ask("/weight_info")
    label = answer.get("weight_version") if isinstance(answer, dict) else None
    return None if label is None else str(label)


def _cache_tokens(asker: Asker) -> int | None:
    """Return the size of the cache that vLLM publishes as labels of a metric; None if it cannot be read."""
    try:
        text = asker.read("/metrics").decode(errors="replace")
    except EngineError:
        return None
    lines = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    sizes = [_cache_size(dict(_LABEL.findall(line)), len(lines)) for line in lines]
    return min(sizes, default=0) or None


def _cache_size(labels: Mapping[str, str], engines: int) -> int:
    """Return the size of the whole cache, which one of the server's engines names; 0 if it names none."""
    # vLLM's own count is that of one engine. It is right for models too whose layers keep different numbers
    # of tokens, where blocks are not. The number of blocks is the sum over all engines.
    own = labels.get("kv_cache_size_tokens", "")
    if _NUMBER.fullmatch(own):
        return int(own) * engines
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(blocks) * int(size) if _NUMBER.fullmatch(blocks) and _NUMBER.fullmatch(size) else 0


def _version(asker: Asker) -> str:
    try:
        answer = asker.ask("/version")
    except EngineError:
        return "unknown"
    return str(answer.get("version", "unknown")) if isinstance(answer, dict) else "unknown"


_ODD = (ArithmeticError, AttributeError, KeyError, TypeError, IndexError, ValueError)
"""What the answer of a server raises that has another form than we read, or numbers that are none."""


def _token_route(
    asker: Asker, model: str, paths: set[str]
) -> tuple[Literal["generate", "completions", "chat"], LogprobScale, bool, Mapping[int, float], str]:
    """Find a route that takes and returns token ids, and what else it returns."""
    if "/inference/v1/generate" in paths:
        try:
            return "generate", *_judged(*(_by_generate(asker, model, heat) for heat in (1.0, 0.5))), ""
        except EngineUnavailable:
            raise
        except (EngineError, *_ODD) as error:
            _log.info("%s: /inference/v1/generate cannot be used: %s", asker.url, error)
    try:
        return "completions", *_judged(*(_by_completions(asker, model, heat) for heat in (1.0, 0.5))), ""
    except EngineUnavailable:
        raise
    except EngineError as error:
        return "chat", "unknown", False, {}, str(error)
    except _ODD:
        return "chat", "unknown", False, {}, "/v1/completions answered without token_ids"


def _follows_grammars(asker: Asker, model: str, route: str) -> bool:
    """Return whether a server samples the one token that a grammar leaves."""
    path, prompt = "/v1/completions", "prompt"
    # Servers that do not know the setting ignore it, so that only the token tells.
    body: dict[str, Any] = {"max_tokens": 1, "ignore_eos": True, **grammar_of(f"start: <[{ONLY}]>", ())}
    if route == "chat":
        return False
    if route == "generate":
        path, prompt, body = "/inference/v1/generate", "token_ids", {"sampling_params": body}
    else:
        body["return_token_ids"] = True
    try:
        answer = asker.ask(path, {"model": model, prompt: list(PROBE_IDS), **body})
        return answer["choices"][0]["token_ids"] == [ONLY]
    except (EngineError, *_ODD):
        return False


def _judged(at_one: _Probed, at_half: _Probed) -> tuple[LogprobScale, bool, Mapping[int, float]]:
    return _scale(at_one.top, at_half.top), at_one.experts, at_one.top


def _by_generate(asker: Asker, model: str, temperature: float) -> _Probed:
    drawn = {"temperature": temperature, "max_tokens": 1, "logprobs": TOP, "seed": 0, "ignore_eos": True}
    body = {"model": model, "token_ids": list(PROBE_IDS), "sampling_params": drawn}
    choice = asker.ask("/inference/v1/generate", body)["choices"][0]
    if len(choice["token_ids"]) != 1:
        raise EngineError("/inference/v1/generate answered without token_ids")
    top = {one["token_id"]: one["logprob"] for one in choice["logprobs"]["content"][0]["top_logprobs"]}
    return _Probed(top, choice.get("routed_experts") is not None)


def _by_completions(asker: Asker, model: str, temperature: float) -> _Probed:
    body = {
        "model": model,
        "prompt": list(PROBE_IDS),
        "max_tokens": 1,
        "temperature": temperature,
        "logprobs": TOP,
        "seed": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    choice = asker.ask("/v1/completions", body)["choices"][0]
    if len(choice["token_ids"]) != 1:
        raise EngineError("/v1/completions answered without token_ids")
    echoed = choice.get("prompt_token_ids")
    if echoed is not None and list(echoed) != list(PROBE_IDS):
        raise EngineError(f"/v1/completions changed the prompt's token ids {PROBE_IDS} to {echoed}")
    top = choice["logprobs"]["top_logprobs"][0]
    known = {int(token.removeprefix("token_id:")): value for token, value in top.items()}
    return _Probed(known, choice.get("routed_experts") is not None)


def _scale(at_one: dict[int, float], at_half: dict[int, float]) -> LogprobScale:
    """Return the scale: if the temperature is applied, differences double from T = 1 to T = 0.5."""
    common = sorted(at_one.keys() & at_half.keys())
    pairs = [(left, right) for left in common for right in common if left < right]
    weight = sum((at_one[left] - at_one[right]) ** 2 for left, right in pairs)
    if weight < 1e-6:
        return "unknown"
    slope = sum((at_one[a] - at_one[b]) * (at_half[a] - at_half[b]) for a, b in pairs) / weight
    if abs(slope - 2.0) < 0.35:
        return "processed"
    return "raw" if abs(slope - 1.0) < 0.35 else "unknown"


def _reason(content: bytes) -> str:
    try:
        return message_of(from_json(content)) or content[:120].decode(errors="replace")
    except ValueError:
        return content[:120].decode(errors="replace")
