"""A plug-in of pytest that records what vLLM's tests show its parsers of calls, and what these read.

It runs in vLLM's own environment, in a folder with vLLM's tests (`benchmarks/turns.py` does it), and records
only what a test holds that passes. One vocabulary stands in for those of all models, with the tags of all
of them as tokens.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_TAG = re.compile(
    r"<\|[^|<>{}'\"\s]+\|>|<\uff5c[^\uff5c<>{}'\"\s]+\uff5c>|\[/?[A-Z][A-Z_]+\]|</?[a-zA-Z][\w:.\-]*>|"
    r"<\|?[a-z_]+\|?>|<\|\"\|>|\]<\]minimax\[>\["
)
_MARKUP = re.compile(r"</?(?:param|parameter|function|invoke|item|div|p|b|a|html|str|int|float)>")
_UNSEEN = re.compile(r"<bos>|<eos>|</s>\Z")
"""Tokens of the vocabularies of vLLM's tests that are no text of a turn."""
_THOUGHT = re.compile("<think>.*?</think>", re.DOTALL)
"""Thinking, which vLLM's parsers of calls leave in the text for others."""
_ROWS: list[dict[str, Any]] = []
_OF_TEST: list[dict[str, Any]] = []


@functools.cache
def _tokenizer() -> Any:
    import vllm.tool_parsers
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_file(os.environ["TURNS_TOKENIZER"])
    package = Path(vllm.tool_parsers.__file__).parents[1]
    folders = (Path("tests/tool_parsers"), *(package / name for name in ("tool_parsers", "parser")))
    sources = [file.read_text(encoding="utf-8") for folder in folders for file in folder.rglob("*.py")]
    tags = {tag for source in sources for tag in _TAG.findall(source) if not _MARKUP.fullmatch(tag)}
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in sorted(tags)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


def pytest_configure() -> None:
    """Give every test the one vocabulary."""
    import vllm.tokenizers
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained = lambda *_args, **_options: _tokenizer()
    vllm.tokenizers.get_tokenizer = lambda *_args, **_options: _tokenizer()


def _recorded(parser: type, method: str) -> None:
    """Let a parser record what a method of it reads."""
    own = parser.__dict__.get(method)
    if own is None or hasattr(own, "recorded"):
        return

    @functools.wraps(own)
    def extract(self: Any, model_output: str, request: Any, *args: Any, **options: Any) -> Any:
        before = len(_OF_TEST)
        read = own(self, model_output, request, *args, **options)
        del _OF_TEST[before:]  # a parser that asks its base class is one row
        tools = next(
            (
                tools
                for at in (request, self)
                for key in ("tools", "_tools")
                if isinstance(tools := getattr(at, key, None), list) and tools
            ),
            [],
        )
        config = getattr(self, "parser_engine_config", None)
        row = {
            "family": config.name if config else type(self).__name__,
            "text": _UNSEEN.sub("", model_output),
            "tools": [_plain(tool) for tool in tools],
        }
        if isinstance(read, tuple):
            thinking, content, calls = read
            row["thinking"] = thinking or ""
        else:
            content, calls = read.content, [call.function for call in read.tool_calls or ()]
        if config:
            begins = config.initial_state.name == "REASONING"
            row["kwargs"] = {"enable_thinking": begins, "thinking": begins}
            row.setdefault("thinking", None)
        row["before_calls"] = True
        row["calls"] = [[call.name, call.arguments] for call in calls or ()]
        row["content"] = _THOUGHT.sub("", content or "")
        _OF_TEST.append(row)
        return read

    extract.recorded = True  # type: ignore[attr-defined]
    setattr(parser, method, extract)


def _plain(tool: Any) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else getattr(tool, "function", tool)
    values = function if isinstance(function, dict) else vars(function)
    parameters = values.get("parameters")
    return {"name": str(values.get("name")), "parameters": parameters if isinstance(parameters, dict) else {}}


def _kinds(parser: type) -> Iterator[type]:
    yield parser
    for each in parser.__subclasses__():
        yield from _kinds(each)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Keep what a test recorded if it passes."""
    from vllm.parser.engine.parser_engine import ParserEngine
    from vllm.tool_parsers.abstract_tool_parser import ToolParser

    for parser in {*_kinds(ToolParser), *_kinds(ParserEngine)}:
        for method in ("extract_tool_calls", "parse"):
            _recorded(parser, method)
    _OF_TEST.clear()
    outcome: Any = yield
    if outcome.excinfo is None:
        _ROWS.extend(row for row in _OF_TEST if isinstance(row["text"], str))


def pytest_sessionfinish() -> None:
    """Write the rows, each once."""
    rows = {json.dumps([row["family"], row["text"], row["tools"]], default=str): row for row in _ROWS}
    Path(os.environ["TURNS_RECORD"]).write_text(
        json.dumps(list(rows.values()), ensure_ascii=False, default=str), encoding="utf-8"
    )
