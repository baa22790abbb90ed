"""The built-in tool-call grammars; strict grammars come before those that accept more."""

# ruff: noqa: RUF001 - DeepSeek writes its tags with a full-width bar
from __future__ import annotations

import re

from agentenv.render.parse.channels import channel_turn
from agentenv.render.parse.grammar import Block, Grammar
from agentenv.render.parse.harmony import harmony_turn
from agentenv.render.parse.json_calls import bare_json, functionary_turn, json_calls, one_json_call
from agentenv.render.parse.literals import NamedLiterals, bare_literals, bare_pythonic, pythonic_calls
from agentenv.render.parse.nested import NestedTags
from agentenv.render.parse.tagged import KeyValuePairs, NamedJson, TaggedParameters

__all__ = ["GRAMMARS"]

_INVOKE = TaggedParameters('<invoke name="', "</invoke>", '<parameter name="', "</parameter>", name_ends=">")
_FUNCTION = TaggedParameters("<function=", "</function>", "<parameter=", "</parameter>", newlines=True)
_MARK = "]<]minimax[>["
_DSML = TaggedParameters(
    '<｜DSML｜invoke name="',
    "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="',
    "</｜DSML｜parameter>",
    typed_by="string",
)


def _indexed_name(before: str) -> tuple[str, str]:
    """Return the name and the id from `functions.NAME:0`."""
    match = re.fullmatch(r"(?:functions\.)?(.*?)(?::\d+)?", before, re.DOTALL)
    return (match.group(1) if match else before), before


def _tagged_id(before: str) -> tuple[str, str]:
    """Return the name and the id from `NAME[CALL_ID]ID`."""
    name, _, call_id = before.partition("[CALL_ID]")
    return name.strip(), call_id.strip()


GRAMMARS: dict[str, Grammar] = {
    grammar.name: grammar
    for grammar in (
        Grammar("text"),
        Grammar("harmony", whole=harmony_turn),
        Grammar("hermes", (Block("<tool_call>", "</tool_call>", one_json_call),)),
        Grammar("function_xml", (Block("<tool_call>", "</tool_call>", _FUNCTION),)),
        Grammar("seed_xml", (Block("<seed:tool_call>", "</seed:tool_call>", _FUNCTION),)),
        Grammar("glm", (Block("<tool_call>", "</tool_call>", KeyValuePairs()),)),
        Grammar("minimax", (Block("<minimax:tool_call>", "</minimax:tool_call>", _INVOKE),)),
        Grammar(
            "minimax_m3",
            (Block(f"{_MARK}<tool_call>", f"{_MARK}</tool_call>", NestedTags(_MARK)),),
        ),
        Grammar("kimi_k3", whole=channel_turn),
        Grammar(
            "dsml",
            (
                Block("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", _DSML),
                Block("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", _DSML),
            ),
        ),
        Grammar(
            "deepseek_v3",
            (Block("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁end｜>", NamedJson("\n")),),
            wrappers=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
        Grammar(
            "deepseek_v31",
            (Block("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", NamedJson("<｜tool▁sep｜>")),),
            wrappers=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
        Grammar(
            "kimi_k2",
            (
                Block(
                    "<|tool_call_begin|>",
                    "<|tool_call_end|>",
                    NamedJson("<|tool_call_argument_begin|>", _indexed_name),
                ),
            ),
            wrappers=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ),
        Grammar("mistral_args", (Block("[TOOL_CALLS]", "", NamedJson("[ARGS]", _tagged_id)),)),
        Grammar("mistral", (Block("[TOOL_CALLS]", "", json_calls),)),
        Grammar("gemma4", (Block("<|tool_call>", "<tool_call|>", NamedLiterals('<|"|>')),)),
        Grammar(
            "functiongemma",
            (Block("<start_function_call>", "<end_function_call>", NamedLiterals("<escape>", untyped=True)),),
        ),
        Grammar("cohere", (Block("<|START_ACTION|>", "<|END_ACTION|>", json_calls),)),
        Grammar("lfm", (Block("<|tool_call_start|>", "<|tool_call_end|>", pythonic_calls),)),
        Grammar("functionary_v31", (Block("<function=", "</function>", NamedJson(">")),)),
        Grammar("functionary_v32", whole=functionary_turn),
        Grammar("pythonic", bare=bare_pythonic),
        Grammar("bare_json", bare=bare_json),
        Grammar("bare_literals", bare=bare_literals),
    )
}
"""The built-in grammars by name."""
