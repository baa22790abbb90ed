"""A chat API on this machine that computes sums with a tool, in OpenAI's protocol."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

USAGE = '{"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}'


def _reply(messages: list[dict]) -> dict:
    """Call the calculator first; then say its result, or 7 where the question's first number is odd."""
    question = next(message["content"] for message in messages if message["role"] == "user")
    first, rest = re.findall(r"(\d+)([^?]*)\?", question)[-1]
    if messages[-1]["role"] != "tool":
        arguments = json.dumps({"expression": first + rest})
        call = {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"role": "assistant", "content": "7" if int(first) % 2 else messages[-1]["content"]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = _reply(body["messages"])
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"]}
        data = (
            json.dumps({**answer, "choices": [choice], "usage": "@@"})
            .replace('"@@"', self.server.usage)
            .encode()
        )
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def chat_server(usage: str = USAGE) -> Generator[str]:
    """Serve from a thread, and yield the address of the API.

    Args:
        usage: JSON text of the usage in every answer, which need not be valid.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.usage = usage  # type: ignore[attr-defined]
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="chat server")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
