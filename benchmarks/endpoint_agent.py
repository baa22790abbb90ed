"""The agent that `endpoint.py` and `endpoint_peers.py` measure servers with; it needs no package.

It asks over HTTP as the SDKs do: one tool call in every turn, and the whole history in every request.
"""

from __future__ import annotations

import json
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

LINE = "the quick brown fox jumps over a lazy dog and runs home at dusk "
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
TEXT = "Let me look at the next page."
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a page.",
        "parameters": {"type": "object", "properties": {"page": {"type": "integer"}}, "required": ["page"]},
    },
}


def ask(url: str, api: str, turns: int, chars: int, key: str = "any") -> None:
    """Play an agent of so many turns, each with a tool result of so many characters."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    result = (LINE * (chars // len(LINE) + 1))[:chars]
    flat = {"name": "look", "description": "Look.", "parameters": TOOL["function"]["parameters"]}
    said: list[Any] = [{"role": "user", "content": "Read the book."}]
    for _ in range(turns):
        body: dict[str, Any] = {"model": "m"}
        if api == "chat":
            body |= {"messages": said, "tools": [TOOL]}
        elif api == "responses":
            body |= {"input": said, "tools": [{"type": "function", **flat}]}
        else:
            body |= {"messages": said, "max_tokens": 500}
            body["tools"] = [{"name": "look", "input_schema": flat["parameters"]}]
        text = json.dumps(body, ensure_ascii=False).encode()
        connection.request("POST", parts.path + PATHS[api], text, headers)
        answer = json.loads(connection.getresponse().read())
        if api == "chat":
            message = answer["choices"][0]["message"]
            id = message["tool_calls"][0]["id"]
            said += [message, {"role": "tool", "tool_call_id": id, "content": result}]
        elif api == "responses":
            id = answer["output"][-1]["call_id"]
            said += [*answer["output"], {"type": "function_call_output", "call_id": id, "output": result}]
        else:
            id = answer["content"][-1]["id"]
            block = {"type": "tool_result", "tool_use_id": id, "content": result}
            said.append({"role": "assistant", "content": answer["content"]})
            said.append({"role": "user", "content": [block]})
