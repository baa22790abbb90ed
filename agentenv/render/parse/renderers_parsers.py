"""Parse completions with the `renderers` package; `grammar="renderers:qwen3"` names one of its formats.

The package parses token ids, thinking included, and its own call statuses are mapped to ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentenv.core.errors import DependencyMissing, UsageError
from agentenv.core.fields import did_you_mean
from agentenv.core.messages import CallStatus
from agentenv.render.parse.grammar import Foreign, RawCall, ToolIndex, TurnText, WholeTurn, as_arguments

if TYPE_CHECKING:
    from agentenv.render.tokenizer import ChatTokenizer

__all__ = ["renderers_parser"]

_INSTALL = "pip install renderers httpx"
"""Installs httpx too, which the package imports without declaring it."""
_STATUS = {
    "ok": CallStatus.OK,
    "unclosed_block": CallStatus.UNCLOSED,
    "missing_name": CallStatus.MISSING_NAME,
    "unknown_tool": CallStatus.UNKNOWN_TOOL,
    "malformed_structure": CallStatus.BAD_ARGUMENTS,
}


@dataclass(frozen=True)
class _Tokenizer:
    """The part of the tokenizer interface that the package uses."""

    tokenizer: ChatTokenizer
    unk_token_id: None = None

    @property
    def name_or_path(self) -> str:
        return self.tokenizer.name

    @property
    def eos_token_id(self) -> int | None:
        return next(iter(self.tokenizer.eos_token_ids), None)

    def encode(self, text: str, *_: object, **__: object) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int], *_: object, **__: object) -> str:
        return self.tokenizer.decode(token_ids)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        return (
            self.tokenizer.token_id(tokens)
            if isinstance(tokens, str)
            else [*map(self.tokenizer.token_id, tokens)]
        )


def renderers_parser(name: str, tokenizer: ChatTokenizer, thinking_open: str = "") -> Foreign:
    """Return a parser that uses the renderer of this name.

    Raises:
        DependencyMissing: The package is not installed.
        UsageError: The package has no renderer of this name, or the renderer refuses the tokenizer.
    """
    try:
        package = import_module("renderers")
    except ImportError as error:
        raise DependencyMissing(f"reading calls with renderers: {error}", remedy=_INSTALL) from error
    try:
        renderer = package.create_renderer(_Tokenizer(tokenizer), package.config_from_name(name))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        known: list[str] = sorted(import_module("renderers.base").RENDERER_REGISTRY)
        raise UsageError(
            f"renderers cannot read {name!r} with {tokenizer.name}: {error}",
            remedy="" if name in known else did_you_mean(name, known),
        ) from error
    prompt = tokenizer.encode(thinking_open) if thinking_open else None

    def read(turn: TurnText, outside: str, tools: ToolIndex) -> WholeTurn:
        parsed = renderer.parse_response(
            list(turn.token_ids), tools=list(tools.entries) or None, prompt_ids=prompt
        )
        calls = [_call(call) for call in parsed.tool_calls]
        return WholeTurn(parsed.content or "", (parsed.reasoning_content or "").strip("\n"), tuple(calls))

    return read


def _call(call: Any) -> RawCall:
    status = _STATUS.get(str(call.status), CallStatus.INVALID_JSON)
    arguments = call.arguments if call.arguments is not None else {}
    if status is CallStatus.OK and not isinstance(arguments, dict):
        status = CallStatus.BAD_ARGUMENTS
    text, parsed = (arguments, None) if isinstance(arguments, str) else as_arguments(arguments)
    error = "" if status is CallStatus.OK else f"the call was not run: {str(call.status).replace('_', ' ')}"
    return RawCall(call.name or "", text, parsed, id=call.id or "", status=status, error=error)
