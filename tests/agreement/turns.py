"""Turns of other libraries' tests, read by our renderer and compared with what those tests expect."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from agentenv.core import CallStatus, ToolCall, text_of
from agentenv.render import Renderer
from agentenv.render.shape import strings
from helpers import chat_cases

__all__ = ["Comparison", "compare"]

REASONS = Path(__file__).parents[1] / "field" / "turn_differences.json"
"""Keys of the turns that are read otherwise, by the reason whose fault it is."""
TEMPLATES = {
    "ApertusToolParser": "Apertus-8B-Instruct",
    "DeepSeekV31ToolParser": "tool_chat_template_deepseekv31",
    "DeepSeekV32EngineToolParser": "deepseek-ai-DeepSeek-V3.2",
    "DeepSeekV3ToolParser": "tool_chat_template_deepseekv3",
    "DeepSeekV4EngineToolParser": "deepseek-ai-DeepSeek-V4",
    "FunctionGemmaToolParser": "tool_chat_template_functiongemma",
    "Gemma4EngineToolParser": "google-gemma-4-31B-it",
    "GigaChat3ToolParser": "GigaChat3-10B-A1.8B",
    "Glm47MoeModelToolParser": "GLM-4.6",
    "Granite20bFCToolParser": "tool_chat_template_granite_20b_fc",
    "Granite4ToolParser": "ibm-granite-granite-4.0",
    "GraniteEngineToolParser": "tool_chat_template_granite",
    "Hermes2ProToolParser": "tool_chat_template_hermes",
    "HunyuanA13BToolParser": "tool_chat_template_hunyuan_a13b",
    "HYV3ToolParser": "tencent-Hy3",
    "Internlm2ToolParser": "tool_chat_template_internlm2_tool",
    "KimiK2ToolParser": "moonshotai-Kimi-K2",
    "Lfm2ToolParser": "LFM2.5-8B-A1B",
    "Llama3JsonToolParser": "meta-llama-Llama-3.1-8B-Instruct",
    "Llama4PythonicToolParser": "tool_chat_template_llama4_pythonic",
    "MiniCPM5XMLToolParser": "openbmb-MiniCPM5-1B",
    "MinimaxM2ToolParser": "MiniMax-M2",
    "MinimaxM3ToolParser": "MiniMax-M3",
    "Phi4MiniJsonToolParser": "tool_chat_template_phi4_mini",
    "PoolsideV1ToolParser": "poolside-Laguna-XS.2",
    "PythonicToolParser": "tool_chat_template_toolace",
    "Qwen3EngineToolParser": "Qwen3-Coder",
    "Step3p5ToolParser": "StepFun3.5-Flash",
    "xLAMToolParser": "tool_chat_template_xlam_qwen",
    "deepseek_v32": "deepseek-ai-DeepSeek-V3.2",
    "deepseek_v4": "deepseek-ai-DeepSeek-V4",
    "gemma4": "google-gemma-4-31B-it",
    "glm47_moe": "GLM-4.7-Flash",
    "granite": "tool_chat_template_granite",
    "kimi_k2": "moonshotai-Kimi-K2",
    "minimax_m2": "MiniMax-M2",
    "minimax_m3": "MiniMax-M3",
    "nemotron_v3": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "qwen3": "Qwen3.5-4B",
    "seed_oss": "ByteDance-Seed-OSS",
    "step3p5": "StepFun3.5-Flash",
}
"""The template that each of vLLM's parsers is for, where it or llama.cpp has one; elsewhere it is the family."""
_ELSEWHERE = {
    "<|function_call|>": ("GigaChat3ToolParser", "GigaChat3.1-10B-A1.8B"),
    "[ARGS]": ("MistralToolParser", "Mistral-Small-3.2-24B-Instruct-2506"),
}
"""Templates of parsers for two, by a tag of the second."""
_TAGS = {"llama": "<|python_start|> <|python_end|> <|python_tag|>"}
"""Control tokens of a family's vocabulary that its template does not write."""
_TEXTLESS = {CallStatus.OK, CallStatus.UNKNOWN_TOOL, CallStatus.IN_THINKING}
"""Statuses of calls that are no part of the text of their message."""


@dataclass(slots=True)
class Comparison:
    """How many turns are read as another library's tests expect."""

    equal: int = 0
    differ: list[str] = field(default_factory=list)
    """What differs, a turn a line, with its reason."""
    unexplained: list[str] = field(default_factory=list)
    """Turns that differ and have no reason."""
    alone: int = 0
    """Turns that SGLang reads otherwise than the tests expect, so that they show nothing of ours."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Turns of families that no template here plays in their own format, by family."""


def compare(rows: Iterable[Mapping[str, Any]], folders: Iterable[Path]) -> Comparison:
    """Compare recorded turns with what we read in them.

    Args:
        rows: turns with their family, tools, and what is expected; those with `sglang` have what it read, too.
        folders: folders with chat templates, which are searched in order.
    """
    reasons = json.loads(REASONS.read_text(encoding="utf-8"))
    reason_of = {key: reason for reason, keys in reasons.items() for key in keys}
    result = Comparison()
    templates = {file.stem: file for folder in folders for file in folder.rglob("*.jinja")}
    seen: set[str] = set()
    for row in rows:
        renderer = _renderer(row, templates)
        same = json.dumps([id(renderer), row["text"], row["tools"], row.get("thinking")])
        if same in seen:
            continue
        seen.add(same)
        if renderer is None or renderer.report.verdict not in {"fast", "history"}:
            family = row["family"]
            result.left_out[family] = result.left_out.get(family, 0) + 1
        elif "sglang" in row and _named(row["sglang"], row) != _named(row["calls"], row):
            result.alone += 1
        elif (said := _difference(row, renderer)) is None or ("sglang" in row and said[:5] != "calls"):
            result.equal += 1
        else:
            key = f"{row['family']} {blake2b(row['text'].encode(), digest_size=4).hexdigest()}"
            result.differ.append(f"{key}: {reason_of.get(key, 'no reason')}: {said}")
            if key not in reason_of:
                result.unexplained.append(f"{key}: {said}\n  {row['text']!r}")
    return result


def _renderer(row: Mapping[str, Any], templates: Mapping[str, Path]) -> Renderer | None:
    family = row["family"]
    name = TEMPLATES.get(family, family)
    for tag, (parser, other) in _ELSEWHERE.items():
        name = other if family == parser and tag in row["text"] else name
    kwargs = row.get("kwargs", {"enable_thinking": False, "thinking": False})
    return _made(templates[name], json.dumps(kwargs)) if name in templates else None


@cache
def _made(template: Path, kwargs: str) -> Renderer:
    tags = " ".join(tags for part, tags in _TAGS.items() if part in template.stem.lower())
    source = template.read_text(encoding="utf-8") + f"{{# {tags} #}}" * bool(tags)
    return Renderer(chat_cases.tokenizer_for(source), template_kwargs=json.loads(kwargs))


def _difference(row: Mapping[str, Any], renderer: Renderer) -> str | None:
    """Return what is read otherwise; None if nothing is."""
    tools = {tool["name"]: tool["parameters"] for tool in row["tools"]}
    functions = [{"name": name, "description": "", "parameters": schema} for name, schema in tools.items()]
    # Where a test passes no tools, those are there that it calls.
    functions = functions or [{"name": name, "description": "", "parameters": {}} for name, _ in row["calls"]]
    bound = renderer.bind([{"type": "function", "function": function} for function in functions])
    opened = (
        "" if "kwargs" in row else renderer._diagnosis.forms.thinking_open
    )  # vLLM's parsers are shown no thinking
    text = dict(renderer._diagnosis.forms.tags)[opened] + row["text"] if opened else row["text"]
    if row["family"] == "HYV3ToolParser":  # the template is that of a release with longer tags
        text = re.sub(r"(</?\w+)>", r"\1:opensource>", text)
    parsed = bound.parse([*_encoded(text, row["calls"], bound), bound.stop_token_ids[0]])
    live = [call for call in parsed.tool_calls if call.status is CallStatus.OK]
    if not row["calls"] and not any(_runs(call, tools) for call in live) and (live or parsed.errors):
        return None  # theirs keeps it as text, and ours tells the model
    wanted = _named(row["calls"], row)
    if parsed.errors:  # theirs returns what no tool can take, and ours tells the model
        wanted = [
            call
            for call, (name, arguments) in zip(wanted, row["calls"], strict=True)
            if _takes(name, arguments, tools)
        ]
    found = [[call.name, _values(call.arguments) if call.name in tools else None] for call in live]
    if wanted != found:
        return f"calls {wanted} were read as {found}, {'; '.join(parsed.errors)}"[:400]
    if any(call.status not in _TEXTLESS for call in parsed.tool_calls):
        return None  # what ours tells the model of stays in the text
    content, thinking = text_of(parsed.message).strip(), parsed.message.get("reasoning_content", "").strip()
    if row.get("thinking", "") is None and thinking:
        return None
    ours, theirs = content.split(), row["content"].split()
    if row.get("before_calls") and row["calls"]:
        behind = " ".join(ours[len(theirs) :])
        ours = (
            ours if any(tag in behind for tag in renderer._diagnosis.grammar.syntax) else ours[: len(theirs)]
        )
    if ours != theirs:
        return f"text {row['content']!r} was read as {content!r}"[:400]
    if row.get("thinking") is not None and thinking != row["thinking"].strip():
        return f"thinking {row['thinking']!r} was read as {thinking!r}"[:400]
    return None


def _encoded(text: str, calls: Iterable[Any], renderer: Renderer) -> list[int]:
    """Return the tokens of a turn, in which tags are control tokens, but plain text in an expected value."""
    values = [value for _, arguments in calls for value in strings(_values(arguments))]
    held = [re.escape(value) for value in values if value in renderer._diagnosis.control]
    ids: list[int] = []
    for index, part in enumerate(re.split(f"({'|'.join(held)})", text) if held else [text]):
        ids += renderer._encode_untrusted(part) if index % 2 else renderer.tokenizer.encode(part)
    return ids


def _named(calls: Iterable[Any], row: Mapping[str, Any]) -> list[list[Any]]:
    """Return calls with the arguments of those whose tools are known."""
    known = {tool["name"] for tool in row["tools"]}
    return [[name, _values(arguments) if name in known else None] for name, arguments in calls]


def _runs(call: ToolCall, tools: Mapping[str, Any]) -> bool:
    """Return whether a tool takes the arguments by their names."""
    schema, keys = tools.get(call.name), json.loads(call.arguments).keys()
    return (
        schema is not None
        and keys <= schema.get("properties", {}).keys()
        and keys >= {*schema.get("required", ())}
    )


def _takes(name: str, arguments: object, tools: Mapping[str, Any]) -> bool:
    """Return whether a call has the name of a tool, or one that a tool could have, and an object."""
    named = name in tools if tools else re.fullmatch(r"[^\s<]+", name) is not None
    return named and isinstance(_values(arguments), dict)


def _values(arguments: object) -> object:
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
