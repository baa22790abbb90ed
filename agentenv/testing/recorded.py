"""A chat engine whose answers are recorded once and replayed in tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

from agentenv.core.errors import EngineError, UsageError
from agentenv.core.files import json_lines
from agentenv.core.messages import JsonValue, Message
from agentenv.engine.interface import ChatCompletion, ChatEngine, Sampling, Usage

__all__ = ["RecordedChat"]


class RecordedChat:
    """Answers from a file. A request that the file lacks goes to the engine, and its answer is recorded.

    Commit the file with the tests, which then need no model, no API key and no network.

    Args:
        path: JSONL file of the answers; created when the first answer is recorded.
        engine: answers requests that the file lacks; without an engine they raise an `EngineError`.
    """

    def __init__(self, path: str | Path, engine: ChatEngine | None = None) -> None:
        self._path = Path(path)
        self._engine = engine
        self.name = engine.name if engine is not None else f"recorded:{self._path.name}"
        self.max_context_tokens = engine.max_context_tokens if engine is not None else None
        self._kept: dict[str, dict[str, Any]] = {}
        if self._path.is_file():
            try:
                self._kept = {row["key"]: row for _, row in json_lines(self._path)}
            except (KeyError, TypeError, ValueError) as error:
                remedy = "remove it, and record the answers again"
                raise UsageError(f"{path} holds no recorded answers: {error}", remedy=remedy) from error

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JsonValue]],
        sampling: Sampling,
        *,
        deadline_s: float | None = None,
    ) -> ChatCompletion:
        """Return the recorded answer, or record a new one.

        Raises:
            EngineError: The request is not in the file and there is no engine.
        """
        key = _key(messages, tools)
        if key not in self._kept:
            if self._engine is None:
                raise EngineError(
                    f"{self._path} has no answer to this request of {len(messages)} messages (the last one: "
                    f"{str(messages[-1].get('content'))[:80]!r})",
                    remedy="pass an engine to record it",
                )
            self._keep(key, await self._engine.chat(messages, tools, sampling, deadline_s=deadline_s))
        row = self._kept[key]
        return ChatCompletion(row["message"], Usage(**row["usage"]), row["finish_reason"])

    async def close(self) -> None:
        """Close the engine, if there is one."""
        if self._engine is not None:
            await self._engine.close()

    def _keep(self, key: str, answer: ChatCompletion) -> None:
        row = {
            "key": key,
            "message": answer.message,
            "usage": asdict(answer.usage),
            "finish_reason": answer.finish_reason,
        }
        self._kept[key] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")  # in ASCII, which also holds halves of characters


def _key(messages: Sequence[Message], tools: Sequence[Mapping[str, JsonValue]]) -> str:
    """Return the key of a request: a digest of messages and tools, without the sampling seed of the run."""
    text = json.dumps([list(messages), list(tools)], sort_keys=True, ensure_ascii=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()
