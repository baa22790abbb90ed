"""The requests with which the doctor asks a chat API what it can do, and what their answers must have.

Each names what the engine does about an API that cannot do it, and what stays wrong all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agentenv.core import text_of
from agentenv_providers.openai.reply import whole_reply

__all__ = ["QUESTIONS", "RESULT", "SUM", "TOOLS", "Json", "Question", "user", "with_messages"]

Json: TypeAlias = "dict[str, Any]"
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
RED: Json = {
    "type": "image_url",
    "image_url": {
        "url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQMAAACQp+OdAAAAA1BMVEXcHh4Np/My"
        "AAAAD0lEQVR42mNgGAWjgHwAAAJAAAHgTR1EAAAAAElFTkSuQmCC"
    },
}
"""An image of 64 x 64 red pixels."""
NONE: Json = {"type": "object", "properties": {}}


def tool(name: str, parameters: Json) -> Json:
    function = {"name": name, "description": f"Use this to {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


def user(content: object) -> Json:
    """Return a message of the user."""
    return {"role": "user", "content": content}


TOOLS = [tool("add", ADD), tool("now", NONE)]
CALL: Json = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'},
}
RESULT: Json = {"role": "tool", "tool_call_id": "call_1", "content": "5"}


def called(content: object, *calls: Json) -> Json:
    return {"role": "assistant", "content": content, "tool_calls": list(calls or (CALL,))}


# What an answer lacks; an empty text for nothing. They may raise whatever odd JSON makes them raise.


def nothing(answer: Json) -> str:
    """Look for a text, a call or thinking."""
    said = answer["choices"][0]["message"]
    return "" if said.get("content") or said.get("tool_calls") or said.get("reasoning_content") else "no text"


def has(*words: str) -> Callable[[Json], str]:
    """Look for one of the words in the text."""

    def lacks(answer: Json) -> str:
        said = text_of(whole_reply(answer["choices"][0], "").message)
        return "" if any(word in said.lower() for word in words) else f"the answer is {said[:60]!r}"

    return lacks


def calls_of(answer: Json) -> list[Json]:
    return [call["function"] for call in answer["choices"][0]["message"].get("tool_calls") or ()]


def makes(*names: str) -> Callable[[Json], str]:
    """Look for calls of these names."""

    def lacks(answer: Json) -> str:
        made = sorted(call["name"] for call in calls_of(answer))
        return "" if made == sorted(names) else f"it calls {', '.join(made) or 'nothing'}"

    return lacks


def ends_by(*reasons: str) -> Callable[[Json], str]:
    """Look for one of the finish reasons."""

    def lacks(answer: Json) -> str:
        reason = answer["choices"][0].get("finish_reason")
        return "" if reason in reasons else f"the finish reason is {reason!r}"

    return lacks


def counts(answer: Json) -> str:
    usage = answer.get("usage") or {}
    fine = all(isinstance(usage.get(name), int) for name in ("prompt_tokens", "completion_tokens"))
    return "" if fine else "it counts no tokens"


def is_json(answer: Json) -> str:
    said = text_of(whole_reply(answer["choices"][0], "").message)
    try:
        json.loads(said)
    except (ValueError, RecursionError):
        return f"the answer is {said[:60]!r}"
    return ""


def plain_calls(answer: Json) -> str:
    """Look for arguments that are a text of JSON, and for distinct ids."""
    made = answer["choices"][0]["message"]["tool_calls"]
    texts = all(isinstance(call["function"]["arguments"], str) for call in made)
    ids = [call.get("id") for call in made]
    if not texts or not all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in made):
        return "the arguments are no text of a JSON object"
    return "" if all(ids) and len(set(ids)) == len(ids) else f"the ids are {ids}"


def plain_text(answer: Json) -> str:
    said = answer["choices"][0]["message"].get("content")
    thought = whole_reply(answer["choices"][0], "").message.get("reasoning_content")
    if not isinstance(said, str):
        return f"the content is a {type(said).__name__}"
    return "its thinking stands in the text" if thought and said.lstrip().startswith(("<", "[")) else ""


def logprobs(answer: Json) -> str:
    return "" if (answer["choices"][0].get("logprobs") or {}).get("content") else "it gives none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request, and what it shows."""

    name: str
    asks: Json = field(default_factory=dict[str, Any])
    """Fields of the request; without messages, it asks for a greeting."""
    lacks: Callable[[Json], str] = nothing
    does: str = ""
    """What the engine does if the API cannot do this."""
    stays: str = ""
    """What then stays wrong."""


def with_messages(*messages: Json, **more: Any) -> Json:
    """Return fields of a request that has these messages."""
    return {"messages": list(messages), **more}


SUM = user("Call the tool add once, with a = 2 and b = 3.")
BOTH = user("Call the tools add, with a = 2 and b = 3, and now, both at once, before you answer.")
LEFT = "leaves it out, and says so once"
WORDS = "reads it all the same"
QUESTIONS: Sequence[Question] = (
    Question(name="text", lacks=nothing, stays="no answer can be evaluated"),
    Question(name="text as a text", lacks=plain_text, does=WORDS),
    Question(name="token counts", lacks=counts, does="estimates lengths", stays="costs are not known"),
    Question(name="finish reason", lacks=ends_by("stop"), does="takes an unknown one as stop"),
    Question(name="max_tokens", asks={"max_tokens": 64}, does="sends max_completion_tokens"),
    Question(name="max_completion_tokens", asks={"max_completion_tokens": 64}, does="sends max_tokens"),
    Question(
        name="cut at the limit",
        asks=with_messages(user("Count from 1 to 200 in words."), limit=16),
        lacks=ends_by("length"),
        stays="an answer that was cut counts as a whole one",
    ),
    Question(
        name="system message",
        asks=with_messages(
            {"role": "system", "content": "Answer with the word blue only."}, user("Which word?")
        ),
        lacks=has("blue"),
        stays="rules in the system message are not kept",
    ),
    Question(
        name="developer message",
        asks=with_messages(
            {"role": "developer", "content": "Answer with the word blue only."}, user("Which word?")
        ),
        lacks=has("blue"),
        does="sends none by itself",
    ),
    Question(
        name="a second turn",
        asks=with_messages(
            user("The word is blue."), {"role": "assistant", "content": "Yes."}, user("Which word?")
        ),
        lacks=has("blue"),
        stays="episodes of several turns",
    ),
    Question(
        name="content as parts",
        asks=with_messages(user([{"type": "text", "text": "Say hello."}])),
        does="sends text as text",
        stays="observations with images",
    ),
    Question(
        name="letters of all kinds",
        asks=with_messages(user("Repeat exactly: é 漢 🙂")),
        lacks=has("漢"),
        stays="text that is not English",
    ),
    Question(name="temperature 0", asks={"temperature": 0.0}, does=LEFT),
    Question(name="temperature 1.3", asks={"temperature": 1.3}, does=LEFT),
    Question(name="top_p", asks={"top_p": 0.9}, does=LEFT),
    Question(name="seed", asks={"seed": 7}, does=LEFT, stays="a run cannot be repeated exactly"),
    Question(name="a seed of 31 bits", asks={"seed": 2**31 - 1}, does=LEFT),
    Question(name="a seed of 63 bits", asks={"seed": 2**62}, does="sends seeds of 31 bits only"),
    Question(
        name="stop strings",
        asks=with_messages(user("Write the numbers from 1 to 9 with spaces between."), stop=["5"]),
        lacks=lambda answer: (
            ""
            if "6" not in text_of(whole_reply(answer["choices"][0], "").message)
            else "it goes on after one"
        ),
        does="cuts the text itself where they are refused",
    ),
    Question(name="an unknown parameter", asks={"agentenv_probe": 1}, does="leaves out what is refused"),
    Question(name="log-probabilities", asks={"logprobs": True}, lacks=logprobs, does="needs none"),
    Question(
        name="JSON",
        asks=with_messages(
            user("Give a JSON object with the key a."), response_format={"type": "json_object"}
        ),
        lacks=is_json,
        does=LEFT,
    ),
    Question(
        name="JSON by a schema",
        asks=with_messages(
            user("Give a = 2 and b = 3."),
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "sum", "schema": {**ADD, "additionalProperties": False}},
            },
        ),
        lacks=is_json,
        does=LEFT,
    ),
    Question(name="streaming", asks={"stream": True}, does="asks for whole answers by default"),
    Question(
        name="token counts of streams",
        asks={"stream": True, "stream_options": {"include_usage": True}},
        lacks=counts,
        does="estimates lengths",
        stays="costs are not known with engine.stream",
    ),
    Question(
        name="a call",
        asks=with_messages(SUM, tools=TOOLS),
        lacks=makes("add"),
        does="describes tools in the system message where they are refused",
        stays="tools",
    ),
    Question(
        name="ids and arguments of calls",
        asks=with_messages(SUM, tools=TOOLS),
        lacks=plain_calls,
        does="makes ids, and reads objects",
    ),
    Question(
        name="finish reason of calls",
        asks=with_messages(SUM, tools=TOOLS),
        lacks=ends_by("tool_calls"),
        does=WORDS,
    ),
    Question(
        name="a call without arguments",
        asks=with_messages(user("Call the tool now."), tools=TOOLS),
        lacks=makes("now"),
        stays="tools without arguments",
    ),
    Question(
        name="calls at once",
        asks=with_messages(BOTH, tools=TOOLS),
        lacks=makes("add", "now"),
        does="plays one call a turn",
    ),
    Question(
        name="no calls at once",
        asks=with_messages(BOTH, tools=TOOLS, parallel_tool_calls=False),
        lacks=lambda answer: "" if len(calls_of(answer)) == 1 else "it makes several",
        does=LEFT,
    ),
    Question(
        name="a call in a stream",
        asks=with_messages(SUM, tools=TOOLS, stream=True),
        lacks=makes("add"),
        stays="tools with engine.stream",
    ),
    Question(
        name="calls at once in a stream",
        asks=with_messages(BOTH, tools=TOOLS, stream=True),
        lacks=makes("add", "now"),
        does="plays one call a turn",
    ),
    Question(
        name="tool_choice required",
        asks=with_messages(user("Say hello."), tools=TOOLS, tool_choice="required"),
        lacks=lambda answer: "" if calls_of(answer) else "it calls nothing",
        does=LEFT,
    ),
    Question(
        name="tool_choice by name",
        asks=with_messages(
            user("Say hello."), tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}}
        ),
        lacks=makes("now"),
        does=LEFT,
    ),
    Question(
        name="tool_choice none",
        asks=with_messages(SUM, tools=TOOLS, tool_choice="none"),
        lacks=makes(),
        does=LEFT,
    ),
    Question(
        name="a result",
        asks=with_messages(SUM, called(None), RESULT, user("What is the sum?"), tools=TOOLS),
        lacks=has("5", "five"),
        stays="tools",
    ),
    Question(
        name="a result without a question",
        asks=with_messages(SUM, called(None), RESULT, tools=TOOLS),
        stays="tools",
    ),
    Question(
        name="an empty text beside a call",
        asks=with_messages(SUM, called(""), RESULT, tools=TOOLS),
        does="sends null in its place",
    ),
    Question(
        name="an empty result",
        asks=with_messages(
            user("Call now."),
            called(None, {**CALL, "function": {"name": "now", "arguments": "{}"}}),
            {**RESULT, "content": ""},
            tools=TOOLS,
        ),
        does="sends words in its place",
    ),
    Question(
        name="two results",
        asks=with_messages(
            BOTH,
            called(
                None,
                CALL,
                {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
            ),
            RESULT,
            {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
            tools=TOOLS,
        ),
        stays="turns with several calls",
    ),
    Question(
        name="broken arguments in the history",
        asks=with_messages(
            SUM,
            called(None, {**CALL, "function": {"name": "add", "arguments": "{a: 2"}}),
            RESULT,
            tools=TOOLS,
        ),
        does="sends them inside an object",
    ),
    Question(
        name="reasoning in the history",
        asks=with_messages(
            user("Hello."),
            {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."},
            user("Say hello."),
        ),
        does=LEFT,
    ),
    Question(
        name="an image",
        asks=with_messages(user([{"type": "text", "text": "Which colour is this?"}, RED])),
        lacks=has("red"),
        stays="environments with images",
    ),
    Question(
        name="an image after a result",
        asks=with_messages(
            SUM,
            called(None),
            RESULT,
            user([{"type": "text", "text": "Which colour is this?"}, RED]),
            tools=TOOLS,
        ),
        lacks=has("red"),
        stays="tools that return images",
    ),
)
"""The requests, in the order of their findings."""
