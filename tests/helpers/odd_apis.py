"""Chat APIs that say ordinary things in odd ways, one small table a kind, and a server that plays them.

Each row is a case: its name, and what the API does. A case is a conversation of two requests: the model calls
`add` (or `now`), and then says the sum. `expects` is the reward, the stop reason, or a word of the error; it
is 1.0, as of an API that answers in OpenAI's own form, unless the row says otherwise. The comment above each
table says where its kind was seen.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

import agentenv as ae

SUM = "The sum is 5."
ARGUMENTS = '{"a": 2, "b": 3}'
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One odd API."""

    name: str
    first: dict[str, Any] = field(default_factory=lambda: {"content": None, "tool_calls": [CALL]})
    """Message of the first answer."""
    then: dict[str, Any] = field(default_factory=lambda: {"content": SUM})
    """Message of the answer after a tool's result."""
    finish: Any = "as usual"
    """Finish reason of the first answer."""
    chunks: list[dict[str, Any]] | None = None
    """Deltas of the first answer, if it comes as a stream whatever was asked for."""
    back: Any = None
    """What the second request must hold in the assistant's message, or the API refuses it."""
    refuses: str = ""
    """Parameter, or key of a message, that the API refuses."""
    error: Any = None
    """Body of the error, with `{}` for the name of the parameter where there is one."""
    status: int = 400
    headers: dict[str, str] = field(default_factory=dict)
    fails: int = 1_000_000
    """How many requests of each conversation fail with the error."""
    body: Any = None
    """Whole body of every answer, in place of a completion."""
    expects: Any = 1.0


def call(**changed):
    function = {"name": "add", "arguments": ARGUMENTS} | changed.pop("function", {})
    return {"id": "call_1", "type": "function", "function": function} | changed


def calls(*made, content=None, **more):
    return {"content": content, "tool_calls": list(made), **more}


THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "Two and three."}]}
NOW = {"name": "now"}

# Calls in other forms: Mistral, Ollama, SGLang, TGI, LiteLLM and vLLM with several parsers.
CALLS = [
    Case(name="calls as OpenAI gives them"),
    Case(name="arguments that are an object", first=calls(call(function={"arguments": {"a": 2, "b": 3}}))),
    Case(name="arguments null", first=calls(call(function=NOW | {"arguments": None}))),
    Case(name="arguments empty", first=calls(call(function=NOW | {"arguments": ""}))),
    Case(name="arguments absent", first=calls({"id": "c", "type": "function", "function": NOW})),
    Case(name="arguments escaped", first=calls(call(function={"arguments": r"{\"a\": 2, \"b\": 3}"}))),
    Case(
        name="arguments in a text of JSON", first=calls(call(function={"arguments": json.dumps(ARGUMENTS)}))
    ),
    Case(name="arguments twice", first=calls(call(function={"arguments": ARGUMENTS * 2}))),
    Case(name="an empty text behind arguments", first=calls(call(function=NOW | {"arguments": '{}""'}))),
    Case(name="ids empty", first=calls(call(id=""), call(id=""))),
    Case(name="ids absent", first=calls({"type": "function", "function": CALL["function"]})),
    Case(name="ids null", first=calls(call(id=None))),
    Case(name="ids that are numbers", first=calls(call(id=7))),
    Case(name="ids twice", first=calls(call(), call())),
    Case(name="a call that is no list", first={"content": "", "tool_calls": CALL}),
    Case(name="a call without its function", first=calls({"id": "c", "name": "add", "arguments": ARGUMENTS})),
    Case(name="a call in the old form", first={"content": None, "function_call": CALL["function"]}),
    Case(name="calls with the finish reason stop", finish="stop"),
    Case(name="calls with the finish reason null", finish=None),
    Case(
        name="a null behind a default", first=calls(call(function={"arguments": '{"a":2,"b":3,"note":null}'}))
    ),
]

# Text in other forms: Mistral, DeepSeek, OpenRouter, servers without a parser for thinking, OpenAI's refusals.
TEXTS = [
    Case(name="text as parts", then={"content": [{"type": "text", "text": SUM}]}),
    Case(name="text as one part", then={"content": {"type": "text", "text": SUM}}),
    Case(name="text as texts", then={"content": ["The sum ", "is 5."]}),
    Case(name="thinking as parts", then={"content": [THOUGHT, {"type": "text", "text": SUM}]}),
    Case(name="thinking beside", then={"content": SUM, "reasoning_content": "Perhaps 6?"}),
    Case(name="thinking by another name", then={"content": SUM, "reasoning": "Perhaps 6?"}),
    *[
        Case(name=f"thinking in tags: {text}", then={"content": text + SUM}, expects="exactly")
        for text in ("<think>6?</think>", "\n<think>\n6?\n</think>\n\n", "6?</think>", "[THINK]6?[/THINK]")
    ],
    Case(name="a refusal", then={"content": None, "refusal": SUM}),
    Case(name="text beside a call", first=calls(CALL, content="I add.")),
    Case(name="parts beside a call", first=calls(CALL, content=[{"type": "text", "text": "I add."}])),
    Case(name="half of a surrogate pair", then={"content": SUM + "\ud83d"}),
    Case(name="nothing", first={"content": ""}, expects=0.0),
    Case(
        name="thinking to the limit", first={"reasoning": "so"}, finish="length", expects="generation_length"
    ),
]

# What has to come back: signatures of Gemini, encrypted reasoning of OpenRouter, reasoning of DeepSeek and Kimi,
# thinking with signatures of gateways to Claude, and no empty text for gateways to Bedrock.
SIGNED = {"google": {"thought_signature": "c2ln"}}
ENCRYPTED = [{"type": "reasoning.encrypted", "data": "x", "index": 0}]
BACK = [
    Case(name="a null", back={"content": None}),
    Case(name="an empty text", first=calls(CALL, content=""), back={"content": ""}),
    Case(
        name="a key of a call",
        first=calls(call(extra_content=SIGNED)),
        back={"tool_calls": [{"extra_content": SIGNED}]},
    ),
    Case(
        name="a key of a function",
        first=calls(call(function={"thought_signature": "c2ln"})),
        back={"tool_calls": [{"function": {"thought_signature": "c2ln"}}]},
    ),
    Case(
        name="a key of a message",
        first=calls(CALL, content="", reasoning_details=ENCRYPTED),
        back={"reasoning_details": ENCRYPTED},
    ),
    Case(name="reasoning", first=calls(CALL, reasoning="Add."), back={"reasoning": "Add."}),
    Case(
        name="reasoning content",
        first=calls(CALL, reasoning_content="Add."),
        back={"reasoning_content": "Add."},
    ),
    Case(
        name="a part with a signature",
        first=calls(CALL, content=[{"type": "thinking", "thinking": "Add.", "signature": "c2ln"}]),
        back={"content": [{"type": "thinking", "thinking": "Add.", "signature": "c2ln"}]},
    ),
    Case(
        name="a part with a key of its own",
        first=calls(CALL, content=[{"type": "text", "text": "So.", "cache_control": {"type": "ephemeral"}}]),
        back={"content": [{"type": "text", "text": "So.", "cache_control": {"type": "ephemeral"}}]},
    ),
]


# Pieces of streams: gateways that repeat names, Gemini's parallel calls, vLLM, Qwen, and Mistral's parts.
def pieces(*parts):
    return [{"role": "assistant", "content": ""}, *({"tool_calls": [part]} for part in parts)]


def piece(index=0, id="call_1", name="add", arguments="", **more):
    return {
        "index": index,
        "id": id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    } | more


STREAMS = [
    Case(
        name="a name in each piece",
        chunks=pieces(piece(), piece(arguments='{"a": 2,'), piece(arguments=' "b": 3}'), piece()),
    ),
    Case(name="all that came so far", chunks=pieces(piece(arguments='{"a":'), piece(arguments=ARGUMENTS))),
    Case(name="no ids and one index", chunks=pieces(*[piece(id="", arguments=ARGUMENTS)] * 2)),
    Case(
        name="no ids, and a call without arguments first",
        chunks=pieces(piece(id="", name="now"), piece(id="", arguments=ARGUMENTS)),
    ),
    Case(
        name="ids that tell the calls of one index apart",
        chunks=pieces(
            piece(id="x"),
            piece(id="y"),
            piece(id="x", name=None, arguments=ARGUMENTS),
            piece(id="y", name=None, arguments=ARGUMENTS),
        ),
    ),
    Case(name="no index", chunks=pieces(piece(index=None, arguments=ARGUMENTS))),
    Case(
        name="an id in the first piece only",
        chunks=pieces(
            piece(), piece(id=None, name=None, arguments='{"a":2,'), piece(id="", arguments='"b":3}')
        ),
    ),
    Case(
        name="a name in two pieces",
        chunks=pieces(piece(name="a"), piece(name="dd"), piece(name=None, arguments=ARGUMENTS)),
    ),
    Case(
        name="a signature in a piece",
        chunks=pieces(piece(extra_content=SIGNED), piece(name=None, arguments=ARGUMENTS)),
        back={"tool_calls": [{"extra_content": SIGNED}]},
    ),
    Case(
        name="details of reasoning in pieces",
        chunks=[
            {"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "Two "}]},
            {"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "and three."}]},
            *pieces(piece(arguments=ARGUMENTS)),
        ],
        back={"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "Two and three."}]},
    ),
    Case(
        name="parts in pieces",
        chunks=[
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Two "}]}]},
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "and three."}]}]},
            {"content": "Well."},
            {"tool_calls": [piece(arguments=ARGUMENTS)]},
        ],
        back={
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "Two and three."}]},
                {"type": "text", "text": "Well."},
            ]
        },
    ),
]

# Shapes in which a parameter is refused: OpenAI, Azure, Gemini, Groq, FastAPI, LiteLLM, Go and plain text.
SHAPES = {
    "object": {
        "error": {"message": "Unsupported parameter: '{}'.", "param": "{}", "code": "unsupported_parameter"}
    },
    "object without a path": {"error": {"message": "{} is not supported with this model."}},
    "list": [
        {
            "error": {
                "code": 400,
                "message": 'Unknown name "{}": Cannot find field.',
                "status": "INVALID_ARGUMENT",
            }
        }
    ],
    "detail": {
        "detail": [
            {"type": "extra_forbidden", "loc": ["body", "{}"], "msg": "Extra inputs are not permitted"}
        ]
    },
    "detail in words": {"detail": "{}: extra fields not permitted"},
    "message": {"object": "error", "message": "Unrecognized request argument supplied: {}", "code": 400},
    "gateway": {"error": {"message": "the provider does not support parameters: ['{}']", "code": "400"}},
    "text": 'json: unknown field "{}"',
    "page": "<html><head><title>400</title></head><body><p>The parameter {} is not allowed</p></body></html>",
    "upstream": {"error": {"message": "Provider error", "metadata": {"raw": "{} is unsupported"}}},
}
LEFT_OUT = ["seed", "temperature", "stop", "max_tokens", "parallel_tool_calls", "stream_options"]
PARAMETERS = [
    *[
        Case(name=f"{name}, refused as {shape}", refuses=name, error=body)
        for name in LEFT_OUT
        for shape, body in SHAPES.items()
    ],
    Case(
        name="max_tokens by another name",
        refuses="max_tokens",
        error={
            "error": {"message": "'{}' is not supported. Use 'max_completion_tokens' instead.", "param": "{}"}
        },
    ),
    Case(
        name="a parameter that is refused in an answer",
        refuses="seed",
        error={"error": {"message": "Unknown parameter: '{}'", "code": 400}},
        status=200,
    ),
    Case(
        name="reasoning that may not come back",
        first=calls(CALL, reasoning="Add."),
        refuses="reasoning",
        error={"error": {"message": "'messages.1' : property '{}' is unsupported"}},
    ),
    Case(
        name="empty text that may not come back",
        first=calls(CALL, content=""),
        refuses="empty text",
        error={"error": {"message": "messages: text content blocks must be non-empty"}},
    ),
    Case(
        name="arguments that are no JSON and may not come back",
        first=calls(call(function={"arguments": "{a: 2"}), CALL),
        refuses="broken arguments",
        error={"message": "invalid JSON in the arguments"},
    ),
]

# What is no answer: Groq's refusal of a call, filters of Azure, Gemini, Anthropic and OpenRouter, limits of
# context, quotas against rates, and what proxies answer.
UNREAD = {
    "error": {
        "message": "Failed to call a function.",
        "code": "tool_use_failed",
        "failed_generation": "<add{2,3}>",
    }
}
RATE = {"error": {"message": "Rate limit reached", "type": "requests", "code": "rate_limit_exceeded"}}
GEMINI_RATE = [
    {
        "error": {
            "code": 429,
            "message": "You exceeded your current quota, please check your plan and billing details.",
            "status": "RESOURCE_EXHAUSTED",
            "details": [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "0.001s"}],
        }
    }
]
ERRORS = [
    Case(name="a call that the API could not read, once", error=UNREAD, fails=1),
    Case(name="calls that the API can never read", error=UNREAD, expects="unread"),
    Case(
        name="a call that Gemini could not read",
        first={"content": None},
        finish="MALFORMED_FUNCTION_CALL",
        expects="unread",
    ),
    Case(
        name="a filter's code",
        error={"error": {"message": "No.", "code": "content_filter"}},
        expects="content_filter",
    ),
    Case(
        name="a filter's inner code",
        error={"error": {"message": "No.", "innererror": {"code": "ResponsibleAIPolicyViolation"}}},
        expects="content_filter",
    ),
    Case(
        name="a filter's words",
        error={"error": {"message": "The prompt was flagged by moderation"}},
        status=403,
        expects="content_filter",
    ),
    Case(
        name="a filter in a completion with the status of an error",
        error={"choices": [{"message": {"content": None}, "finish_reason": "content_filter"}]},
        expects="content_filter",
    ),
    *[
        Case(
            name=f"the finish reason {reason}", first={"content": ""}, finish=reason, expects="content_filter"
        )
        for reason in (
            "content_filter",
            "SAFETY",
            "PROHIBITED_CONTENT",
            "refusal",
            "recitation",
            "ERROR_TOXIC",
        )
    ],
    Case(
        name="a context that is full",
        error=[{"error": {"message": "The input token count (9) exceeds 8"}}],
        expects="context_length",
    ),
    Case(name="a rate", error=RATE, status=429, headers={"Retry-After": "0"}, fails=2),
    Case(name="Gemini's rate", error=GEMINI_RATE, status=429, fails=2),
    Case(name="a busy server", error="upstream connect error", status=503, fails=2),
    Case(
        name="a quota",
        error={"error": {"message": "Over.", "code": "insufficient_quota"}},
        status=429,
        expects="Over",
    ),
    Case(
        name="a quota of days",
        error={"error": {"message": "Resets in 16 days."}},
        status=429,
        headers={"Retry-After": "1382400"},
        expects="16 days",
    ),
    Case(
        name="a quota in words",
        error={"detail": "Your monthly limit is used up: check your billing."},
        status=429,
        expects="billing",
    ),
    Case(
        name="a key that is wrong",
        error={"error": {"message": "Access denied", "code": "401"}},
        status=401,
        expects="Access denied",
    ),
    Case(
        name="an error in an answer",
        body={"error": {"message": "No credit", "code": 402}},
        expects="No credit",
    ),
    Case(
        name="a busy server in an answer", error={"error": {"message": "?", "code": 502}}, status=200, fails=2
    ),
    Case(
        name="a filter in an answer",
        error={"error": {"code": "content_filter"}},
        status=200,
        expects="content_filter",
    ),
    Case(name="an unread call in an answer", error=UNREAD, status=200, fails=1),
    Case(
        name="a limit that is told as an error",
        error={"error": {"message": "Could not finish the message because max_tokens was reached."}},
        expects="generation_length",
    ),
    # vLLM and SGLang that stop, OpenRouter, GLM, DeepSeek: nothing that the model meant to say.
    *[
        Case(name=f"broken off by {reason}", first={"content": "The"}, finish=reason, expects="broke off")
        for reason in ("error", "abort", "network_error", "insufficient_system_resource")
    ],
    # Servers that were started without the model's parser: vLLM, SGLang, llama.cpp, Ollama, gateways.
    *[
        Case(name=f"a call left in the text: {text:.14}", first={"content": text}, expects="unread")
        for text in (
            '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>',
            '[TOOL_CALLS]add[ARGS]{"a": 2, "b": 3}',
            "I add. <function=add><parameter=a>2</parameter><parameter=b>3</parameter></function>",
            "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>add<\uff5ctool▁sep\uff5c>{}",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0",
            "<|tool_call_start|>[add(a=2, b=3)]<|tool_call_end|>",
            "<minimax:tool_call>",
            "<|tool_call>call:add{a:2,b:3}<tool_call|>",
            '<|python_tag|>{"name": "add", "parameters": {"a": 2, "b": 3}}',
        )
    ],
    Case(name="no choices", body={"choices": None}, expects="without a choice"),
    Case(name="an empty list of choices", body={"choices": []}, expects="without a choice"),
    Case(name="no message", body={"choices": [{"message": None}]}, expects="the message is null"),
    Case(name="nothing at all", body="", expects="empty"),
    Case(name="a page", body="<html><body>proxy login</body></html>", expects="proxy login"),
]
ALL = [*CALLS, *TEXTS, *BACK, *STREAMS, *PARAMETERS, *ERRORS]


class Adder(ae.ToolEnv):
    """Knows nothing of who plays it."""

    def start(self, case: int = 0) -> str:
        self.seen = 0
        return f"Case {case}: what is 2 + 3? Use add."

    @ae.tool
    def add(self, a: int, b: int, note: str = "") -> int:
        """Add two numbers."""
        self.seen += a + b == 5
        return a + b

    @ae.tool
    def now(self) -> str:
        """Say the time."""
        self.seen += 1
        return "noon"

    def reward(self, answer: str) -> float:
        return float(SUM in answer and self.seen > 0)


TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "A tool.", "parameters": {"type": "object"}},
    }
    for name in ("add", "now")
]


class AgentAdder(ae.AgentEnv):
    """The same task for an agent whose client keeps role, content and calls only, as SDKs do."""

    async def agent(self, url: str, task: dict[str, Any]) -> str | None:
        self.seen = 0
        messages: list[Any] = [{"role": "user", "content": f"Case {task.get('case', 0)}: what is 2 + 3?"}]
        async with aiohttp.ClientSession() as http:
            while True:
                asked = {"model": "m", "messages": messages, "tools": TOOLS}
                async with http.post(f"{url}/v1/chat/completions", json=asked) as reply:
                    said = (await reply.json())["choices"][0]["message"]
                made = said.get("tool_calls")
                if not made:
                    return said["content"]
                messages.append({"role": "assistant", "content": said["content"], "tool_calls": made})
                for one in made:
                    self.seen += isinstance(_object(one["function"]["arguments"]), dict)
                    messages.append({"role": "tool", "tool_call_id": one["id"], "content": "5"})

    def reward(self, answer: str) -> float:
        return float(SUM in (answer or "") and self.seen > 0)


def _object(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def holds(said: Any, wanted: Any) -> bool:
    """Return whether a JSON value has all that is wanted, at its place."""
    if isinstance(wanted, dict) and isinstance(said, dict):
        return all(key in said and holds(said[key], value) for key, value in wanted.items())
    if isinstance(wanted, list) and isinstance(said, list):
        return len(said) == len(wanted) and all(map(holds, said, wanted))
    return said == wanted


class Player:
    """Plays cases; each conversation names its case in its first message."""

    def __init__(self, cases: list[Case]) -> None:
        self.cases = cases
        self.bodies: list[dict[str, Any]] = []
        self._failed: Counter[str] = Counter()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        asked = str(body["messages"][-1 if len(body["messages"]) == 1 else 0]["content"])
        told = next(str(one["content"]) for one in body["messages"] if one["role"] == "user")
        case = (
            self.cases[int(told.removeprefix("Case ").partition(":")[0])] if "Case" in told else self.cases[0]
        )
        second = any(message["role"] == "tool" for message in body["messages"])
        if case.body is not None:
            return _raw(case.body, 200)
        if case.error is not None and self._refused(case, body, asked + told):
            text = case.error if isinstance(case.error, str) else json.dumps(case.error)
            return _raw(text.replace("{}", case.refuses), case.status, case.headers)
        if second and case.back is not None:
            said = [message for message in body["messages"] if message["role"] == "assistant"]
            if not all(holds(message, case.back) for message in said):
                return _raw({"error": {"message": f"missing in the history: {case.back}"}}, 400)
        message = {"role": "assistant", **(case.then if second else case.first)}
        usual = "tool_calls" if message.get("tool_calls") else "stop"
        finish = usual if second or case.finish == "as usual" else case.finish
        deltas = case.chunks if case.chunks is not None and not second else None
        if deltas is None and not body.get("stream"):
            usage = {"prompt_tokens": 10, "completion_tokens": 5}
            return _raw({"choices": [{"message": message, "finish_reason": finish}], "usage": usage}, 200)
        return await _stream(request, deltas or _deltas(message), finish)

    def _refused(self, case: Case, body: dict[str, Any], conversation: str) -> bool:
        if not case.refuses:
            self._failed[conversation] += 1
            return self._failed[conversation] <= case.fails
        said = [message for message in body["messages"] if message["role"] == "assistant"]
        made = [one for message in said for one in message.get("tool_calls") or ()]
        if case.refuses == "empty text":
            return any(message.get("content") == "" for message in body["messages"])
        if case.refuses == "broken arguments":
            return any(_object(one["function"]["arguments"]) is None for one in made)
        return case.refuses in body or any(case.refuses in message for message in said)


def _raw(body: Any, status: int, headers: dict[str, str] | None = None) -> web.Response:
    text = body if isinstance(body, str) else json.dumps(body)
    kind = "text/html" if text.startswith("<") else "application/json"
    return web.Response(text=text, status=status, headers=headers, content_type=kind)


def _deltas(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the deltas of a message: a text in two pieces, and all else as it is."""
    deltas: list[dict[str, Any]] = []
    for key, value in message.items():
        if isinstance(value, str) and key != "role":
            deltas += [{key: value[:3]}, {key: value[3:]}]
        elif key == "tool_calls" and isinstance(value, list):
            deltas += [{key: [{"index": index, **one}]} for index, one in enumerate(value)]
        else:
            deltas.append({key: value})
    return deltas


async def _stream(request: web.Request, deltas: list[dict[str, Any]], finish: Any) -> web.StreamResponse:
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await reply.prepare(request)
    ends = [{"choices": [{"delta": {}, "finish_reason": finish}]}]
    ends.append({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 5}})
    for chunk in [*({"choices": [{"index": 0, "delta": delta}]} for delta in deltas), *ends]:
        await reply.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await reply.write_eof(b"data: [DONE]\n\n")
    return reply


@asynccontextmanager
async def playing(cases: list[Case]):
    """Serve cases; yields the address and the player."""
    player = Player(cases)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", player.chat)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1", player
    finally:
        await runner.cleanup()
