"""Sends conversations to a chat API with the openai package, for APIs that need what only the SDK has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from importlib import import_module
from typing import Any

from pydantic_core import from_json

from agentenv.core.errors import DependencyMissing, UsageError
from agentenv.engine.chat_answer import joined
from agentenv.engine.chat_client import ChatFailure

__all__ = ["SDKS", "SDKClient"]

SDKS = {"openai": "AsyncOpenAI", "azure": "AsyncAzureOpenAI"}
"""Clients of the openai package, by the names under which they can be chosen."""


class SDKClient:
    """Sends requests through a client of the openai package.

    Args:
        sdk: name of the client in `SDKS`.
        address: address of the API; empty for what the environment variables of the SDK say.
        api_key: key for the API; empty for what the environment variables of the SDK say.
        max_retries: how often the SDK retries each request.
        timeout_s: time limit of each attempt in seconds.

    Raises:
        DependencyMissing: The openai package is not installed.
        UsageError: The SDK lacks a setting.
    """

    def __init__(self, sdk: str, address: str, api_key: str, *, max_retries: int, timeout_s: float) -> None:
        try:
            self._openai: Any = import_module("openai")
        except ImportError:
            raise DependencyMissing(
                f"sdk={sdk} needs the openai package", remedy="pip install openai, or leave sdk out"
            ) from None
        where = {"azure_endpoint" if sdk == "azure" else "base_url": address, "api_key": api_key}
        settings = {name: value for name, value in where.items() if value}
        try:
            client_type: Any = getattr(self._openai, SDKS[sdk])
            self._client = client_type(max_retries=max_retries, timeout=timeout_s, **settings)
        except (self._openai.OpenAIError, ValueError) as error:
            raise UsageError(f"sdk={sdk} cannot be used: {error}") from error

    async def send(self, body: Mapping[str, Any], *, stream: bool) -> Any:
        """Send a request; see `agentenv.engine.chat_client.ChatClient.send`."""
        rest = {name: value for name, value in body.items() if name not in {"model", "messages"}}
        request = {"model": body["model"], "messages": body["messages"], "extra_body": rest}
        completions: Any = self._client.chat.completions
        try:
            if stream:
                return await joined(_dicts(await completions.create(**request, stream=True)))
            return from_json((await completions.with_raw_response.create(**request)).content)
        except self._openai.APIError as error:
            raise self._failure(error) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def _failure(self, error: Any) -> ChatFailure:
        kind, status = type(error).__name__, getattr(error, "status_code", None)
        return ChatFailure(kind, error.message, status=status, body=error.body)


async def _dicts(chunks: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yield the chunks of a stream as plain dicts."""
    async for chunk in chunks:
        yield chunk.to_dict(warnings=False)
