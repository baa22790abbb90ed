"""Parse calls with one of vLLM's tool parsers, under its name in vLLM: `grammar="vllm:hermes"`.

The parser gets the text outside of thinking. Call ids are kept only if the model wrote them, because
vLLM makes up random ids for the other calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentenv.core.errors import DependencyMissing, UsageError
from agentenv.core.fields import did_you_mean
from agentenv.render.parse.grammar import Foreign, ToolIndex, TurnText, WholeTurn
from agentenv.render.parse.json_calls import arguments_call

if TYPE_CHECKING:
    from agentenv.render.tokenizer import ChatTokenizer

__all__ = ["vllm_parser"]

_PARSERS = ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers")
_PROTOCOLS = ("vllm.entrypoints.openai.chat_completion.protocol", "vllm.entrypoints.openai.protocol")


def vllm_parser(name: str, tokenizer: ChatTokenizer) -> Foreign:
    """Return a parser that uses the vLLM tool parser of this name.

    Raises:
        DependencyMissing: vLLM is not installed.
        UsageError: vLLM has no tool parser of this name.
    """
    manager, request_of = _first(_PARSERS).ToolParserManager, _first(_PROTOCOLS).ChatCompletionRequest
    try:
        parser = manager.get_tool_parser(name)
    except KeyError:
        known: list[str] = manager.list_registered()
        raise UsageError(
            f"vLLM has no tool parser {name!r}",
            remedy=f"{did_you_mean(name, known)} one of: {', '.join(known)}".lstrip(),
        ) from None
    fast = import_module("transformers").PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, **tokenizer.special_tokens
    )

    def read(turn: TurnText, outside: str, tools: ToolIndex) -> WholeTurn:
        request = request_of(messages=[], model=tokenizer.name, tools=list(tools.entries) or None)
        extracted = parser(fast, request.tools).extract_tool_calls(outside, request)
        calls = [
            arguments_call(
                call.function.name,
                call.function.arguments,
                call.id if call.id and call.id in outside else "",
            )
            for call in extracted.tool_calls
        ]
        return WholeTurn(extracted.content or "", "", tuple(calls))

    return read


def _first(names: Sequence[str]) -> Any:
    """Import the first of these modules that the installed version of vLLM has."""
    error: ImportError | None = None
    for name in names:
        try:
            return import_module(name)
        except ImportError as missing:
            error = missing
    raise DependencyMissing.of("vllm", "vllm", purpose="its tool parsers") from error
