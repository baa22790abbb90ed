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
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

import agentenv as ae
from helpers.servers import events, http_server, streamed

SUM = "The sum is 5."
ARGUMENTS = '{"a": 2, "b": 3}'
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}


@dataclass(frozen=True)
class Case:
    """One odd API."""

    name: str
    _: KW_ONLY
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


def call(
    arguments: Any = ARGUMENTS, name: str = "add", *, of_function: Any = None, **changed: Any
) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments, **(of_function or {})}
    return {"id": "call_1", "type": "function", "function": function} | changed


def calls(*made: Any, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"content": content, "tool_calls": list(made), **more}


def error(message: str, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, **more}}


# Calls in other forms: Mistral, Ollama, SGLang, TGI, LiteLLM and vLLM with several parsers.
NOW = {"name": "now"}
MADE: dict[str, list[Any]] = {
    "arguments that are an object": [call({"a": 2, "b": 3})],
    "arguments null": [call(None, "now")],
    "arguments empty": [call("", "now")],
    "arguments absent": [{"id": "c", "type": "function", "function": NOW}],
    "arguments escaped": [call(r"{\"a\": 2, \"b\": 3}")],
    "arguments in a text of JSON": [call(json.dumps(ARGUMENTS))],
    "arguments twice": [call(ARGUMENTS * 2)],
    "an empty text behind arguments": [call('{}""', "now")],
    "ids empty": [call(id=""), call(id="")],
    "ids absent": [{"type": "function", "function": CALL["function"]}],
    "ids null": [call(id=None)],
    "ids that are numbers": [call(id=7)],
    "ids twice": [call(), call()],
    "a call without its function": [{"id": "c", "name": "add", "arguments": ARGUMENTS}],
    "a null behind a default": [call('{"a":2,"b":3,"note":null}')],
}
CALLS = [
    Case("calls as OpenAI gives them"),
    *[Case(name, first=calls(*made)) for name, made in MADE.items()],
    Case("a call that is no list", first={"content": "", "tool_calls": CALL}),
    Case("a call in the old form", first={"content": None, "function_call": CALL["function"]}),
    Case("calls with the finish reason stop", finish="stop"),
    Case("calls with the finish reason null", finish=None),
]

# Text in other forms: Mistral, DeepSeek, OpenRouter, servers without a parser for thinking, OpenAI's refusals.
PART = {"type": "text", "text": SUM}
THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "Two and three."}]}
THINKING = ("<think>6?</think>", "\n<think>\n6?\n</think>\n\n", "6?</think>", "[THINK]6?[/THINK]")
SAID: dict[str, dict[str, Any]] = {
    "text as parts": {"content": [PART]},
    "text as one part": {"content": PART},
    "text as texts": {"content": ["The sum ", "is 5."]},
    "thinking as parts": {"content": [THOUGHT, PART]},
    "thinking beside": {"content": SUM, "reasoning_content": "Perhaps 6?"},
    "thinking by another name": {"content": SUM, "reasoning": "Perhaps 6?"},
    "a refusal": {"content": None, "refusal": SUM},
    "half of a surrogate pair": {"content": SUM + "\ud83d"},
}
TEXTS = [
    *[Case(name, then=said) for name, said in SAID.items()],
    *[
        Case(f"thinking in tags: {text}", then={"content": text + SUM}, expects="exactly")
        for text in THINKING
    ],
    Case("text beside a call", first=calls(CALL, content="I add.")),
    Case("parts beside a call", first=calls(CALL, content=[{"type": "text", "text": "I add."}])),
    Case("nothing", first={"content": ""}, expects=0.0),
    Case("thinking to the limit", first={"reasoning": "so"}, finish="length", expects="generation_length"),
]

# What has to come back: signatures of Gemini, encrypted reasoning of OpenRouter, reasoning of DeepSeek and Kimi,
# thinking with signatures of gateways to Claude, and no empty text for gateways to Bedrock.
SIGNED = {"google": {"thought_signature": "c2ln"}}
OF_FUNCTION = {"thought_signature": "c2ln"}
ENCRYPTED = [{"type": "reasoning.encrypted", "data": "x", "index": 0}]
SIGNED_PART = [{"type": "thinking", "thinking": "Add.", "signature": "c2ln"}]
KEYED_PART = [{"type": "text", "text": "So.", "cache_control": {"type": "ephemeral"}}]
EXTRA = {"tool_calls": [{"extra_content": SIGNED}]}
BACK = [
    Case("a null", back={"content": None}),
    Case("an empty text", first=calls(CALL, content=""), back={"content": ""}),
    Case("a key of a call", first=calls(call(extra_content=SIGNED)), back=EXTRA),
    Case(
        "a key of a function",
        first=calls(call(of_function=OF_FUNCTION)),
        back={"tool_calls": [{"function": OF_FUNCTION}]},
    ),
    *[
        Case(name, first=calls(CALL, **back), back=back)
        for name, back in {
            "a key of a message": {"content": "", "reasoning_details": ENCRYPTED},
            "reasoning": {"reasoning": "Add."},
            "reasoning content": {"reasoning_content": "Add."},
            "a part with a signature": {"content": SIGNED_PART},
            "a part with a key of its own": {"content": KEYED_PART},
        }.items()
    ],
]


# Pieces of streams: gateways that repeat names, Gemini's parallel calls, vLLM, Qwen, and Mistral's parts.
def pieces(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": ""}, *({"tool_calls": [part]} for part in parts)]


def piece(
    arguments: str = "",
    name: str | None = "add",
    id: str | None = "call_1",
    index: int | None = 0,
    **more: Any,
) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": id, "type": "function", "function": function} | more


def reasoned(text: str) -> dict[str, Any]:
    return {"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": text}]}


def thought(text: str) -> dict[str, Any]:
    return {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": text}]}]}


PIECES: dict[str, list[dict[str, Any]]] = {
    "a name in each piece": [piece(), piece('{"a": 2,'), piece(' "b": 3}'), piece()],
    "all that came so far": [piece('{"a":'), piece(ARGUMENTS)],
    "no ids and one index": [piece(ARGUMENTS, id="")] * 2,
    "no ids, and a call without arguments first": [piece("", "now", id=""), piece(ARGUMENTS, id="")],
    "ids that tell the calls of one index apart": [
        *(piece(id="x"), piece(id="y"), piece(ARGUMENTS, None, "x"), piece(ARGUMENTS, None, "y")),
    ],
    "no index": [piece(ARGUMENTS, index=None)],
    "an id in the first piece only": [piece(), piece('{"a":2,', None, None), piece('"b":3}', id="")],
    "a name in two pieces": [piece("", "a"), piece("", "dd"), piece(ARGUMENTS, None)],
}
STREAMS = [
    *[Case(name, chunks=pieces(*parts)) for name, parts in PIECES.items()],
    Case(
        "a signature in a piece",
        chunks=pieces(piece(extra_content=SIGNED), piece(ARGUMENTS, None)),
        back=EXTRA,
    ),
    Case(
        "details of reasoning in pieces",
        chunks=[reasoned("Two "), reasoned("and three."), *pieces(piece(ARGUMENTS))],
        back=reasoned("Two and three."),
    ),
    Case(
        "parts in pieces",
        chunks=[
            *(thought("Two "), thought("and three."), {"content": "Well."}),
            {"tool_calls": [piece(ARGUMENTS)]},
        ],
        back={"content": [THOUGHT, {"type": "text", "text": "Well."}]},
    ),
]

# Shapes in which a parameter is refused: OpenAI, Azure, Gemini, Groq, FastAPI, LiteLLM, Go and plain text.
FORBIDDEN = {"type": "extra_forbidden", "loc": ["body", "{}"], "msg": "Extra inputs are not permitted"}
SHAPES: dict[str, Any] = {
    "object": error("Unsupported parameter: '{}'.", param="{}", code="unsupported_parameter"),
    "object without a path": error("{} is not supported with this model."),
    "list": [error('Unknown name "{}": Cannot find field.', code=400, status="INVALID_ARGUMENT")],
    "detail": {"detail": [FORBIDDEN]},
    "detail in words": {"detail": "{}: extra fields not permitted"},
    "message": {"object": "error", "message": "Unrecognized request argument supplied: {}", "code": 400},
    "gateway": error("the provider does not support parameters: ['{}']", code="400"),
    "text": 'json: unknown field "{}"',
    "page": "<html><head><title>400</title></head><body><p>The parameter {} is not allowed</p></body></html>",
    "upstream": error("Provider error", metadata={"raw": "{} is unsupported"}),
}
LEFT_OUT = ["seed", "temperature", "stop", "max_tokens", "parallel_tool_calls", "stream_options"]
OTHER_NAME = error("'{}' is not supported. Use 'max_completion_tokens' instead.", param="{}")
PARAMETERS = [
    *[
        Case(f"{name}, refused as {shape}", refuses=name, error=body)
        for name in LEFT_OUT
        for shape, body in SHAPES.items()
    ],
    Case("max_tokens by another name", refuses="max_tokens", error=OTHER_NAME),
    Case(
        "a parameter that is refused in an answer",
        refuses="seed",
        error=error("Unknown parameter: '{}'", code=400),
        status=200,
    ),
    Case(
        "reasoning that may not come back",
        first=calls(CALL, reasoning="Add."),
        refuses="reasoning",
        error=error("'messages.1' : property '{}' is unsupported"),
    ),
    Case(
        "empty text that may not come back",
        first=calls(CALL, content=""),
        refuses="empty text",
        error=error("messages: text content blocks must be non-empty"),
    ),
    Case(
        "arguments that are no JSON and may not come back",
        first=calls(call("{a: 2"), CALL),
        refuses="broken arguments",
        error={"message": "invalid JSON in the arguments"},
    ),
]

# What is no answer: Groq's refusal of a call, filters of Azure, Gemini, Anthropic and OpenRouter, limits of
# context, quotas against rates, and what proxies answer.
UNREAD = error("Failed to call a function.", code="tool_use_failed", failed_generation="<add{2,3}>")
RATE = error("Rate limit reached", type="requests", code="rate_limit_exceeded")
RETRY_INFO = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "0.001s"}
OVER = "You exceeded your current quota, please check your plan and billing details."
GEMINI_RATE = [error(OVER, code=429, status="RESOURCE_EXHAUSTED", details=[RETRY_INFO])]
FILTERED = {"choices": [{"message": {"content": None}, "finish_reason": "content_filter"}]}
FILTERS: dict[str, dict[str, Any]] = {
    "a filter's code": {"error": error("No.", code="content_filter")},
    "a filter's inner code": {"error": error("No.", innererror={"code": "ResponsibleAIPolicyViolation"})},
    "a filter's words": {"error": error("The prompt was flagged by moderation"), "status": 403},
    "a filter in a completion with the status of an error": {"error": FILTERED},
    "a filter in an answer": {"error": {"error": {"code": "content_filter"}}, "status": 200},
    **{
        f"the finish reason {reason}": {"first": {"content": ""}, "finish": reason}
        for reason in (
            "content_filter",
            "SAFETY",
            "PROHIBITED_CONTENT",
            "refusal",
            "recitation",
            "ERROR_TOXIC",
        )
    },
}
PASSES: dict[str, dict[str, Any]] = {
    "a call that the API could not read, once": {"error": UNREAD, "fails": 1},
    "an unread call in an answer": {"error": UNREAD, "status": 200, "fails": 1},
    "a rate": {"error": RATE, "status": 429, "headers": {"Retry-After": "0"}, "fails": 2},
    "Gemini's rate": {"error": GEMINI_RATE, "status": 429, "fails": 2},
    "a busy server": {"error": "upstream connect error", "status": 503, "fails": 2},
    "a busy server in an answer": {"error": error("?", code=502), "status": 200, "fails": 2},
}
LASTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a quota": ("Over", {"error": error("Over.", code="insufficient_quota"), "status": 429}),
    "a quota of days": (
        "16 days",
        {"error": error("Resets in 16 days."), "status": 429, "headers": {"Retry-After": "1382400"}},
    ),
    "a quota in words": (
        "billing",
        {"error": {"detail": "Your monthly limit is used up: check your billing."}, "status": 429},
    ),
    "a key that is wrong": ("Access denied", {"error": error("Access denied", code="401"), "status": 401}),
    "an error in an answer": ("No credit", {"body": error("No credit", code=402)}),
    "no choices": ("without a choice", {"body": {"choices": None}}),
    "an empty list of choices": ("without a choice", {"body": {"choices": []}}),
    "no message": ("the message is null", {"body": {"choices": [{"message": None}]}}),
    "nothing at all": ("empty", {"body": ""}),
    "a page": ("proxy login", {"body": "<html><body>proxy login</body></html>"}),
}
# vLLM and SGLang that stop, OpenRouter, GLM, DeepSeek: nothing that the model meant to say.
BROKEN_OFF = ("error", "abort", "network_error", "insufficient_system_resource")
# Servers that were started without the model's parser: vLLM, SGLang, llama.cpp, Ollama, gateways.
LEFT_IN_TEXT = (
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
NO_CALL = {"first": {"content": None}, "finish": "MALFORMED_FUNCTION_CALL"}
CONTEXT = [error("The input token count (9) exceeds 8")]
CUT = error("Could not finish the message because max_tokens was reached.")
ERRORS = [
    *[Case(name, **given) for name, given in PASSES.items()],
    *[Case(name, expects="content_filter", **given) for name, given in FILTERS.items()],
    *[Case(name, expects=said, **given) for name, (said, given) in LASTS.items()],
    Case("calls that the API can never read", error=UNREAD, expects="unread"),
    Case("a call that Gemini could not read", expects="unread", **NO_CALL),
    Case("a context that is full", error=CONTEXT, expects="context_length"),
    Case("a limit that is told as an error", error=CUT, expects="generation_length"),
    *[
        Case(f"broken off by {reason}", first={"content": "The"}, finish=reason, expects="broke off")
        for reason in BROKEN_OFF
    ],
    *[
        Case(f"a call left in the text: {text:.14}", first={"content": text}, expects="unread")
        for text in LEFT_IN_TEXT
    ],
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
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"delta": {}, "finish_reason": finish}]})
    chunks.append({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 5}})
    return await streamed(request, *events(*chunks, "[DONE]"))


@asynccontextmanager
async def playing(cases: list[Case]):
    """Serve cases; yields the address and the player."""
    player = Player(cases)
    async with http_server(player.chat) as url:
        yield f"{url}/v1", player
