"""The built-in tool-call grammars; strict grammars come before those that accept more."""

# ruff: noqa: RUF001 - DeepSeek writes its tags with a full-width bar
from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from agentenv.core.messages import CallStatus
from agentenv.render.parse.grammar import (
    Block,
    Grammar,
    Nested,
    RawCall,
    Span,
    TurnText,
    WholeTurn,
    held,
    repeated,
    stray_text,
)
from agentenv.render.parse.json_calls import (
    arguments_call,
    bare_json,
    functionary_turn,
    invalid,
    json_calls,
    one_json_call,
    spell_json,
)
from agentenv.render.parse.literals import (
    NamedLiterals,
    bare_literals,
    bare_pythonic,
    pythonic_calls,
    spell_pythonic,
)
from agentenv.render.parse.tagged import NamedJson, TaggedParameters
from agentenv.render.parse.values import MAX_DEPTH

__all__ = ["GRAMMARS"]

_INVOKE = TaggedParameters('<invoke name="', "</invoke>", '<parameter name="', "</parameter>")
_FUNCTION = TaggedParameters("<function=", "</function>", "<parameter=", "</parameter>", newlines=True)
_MARK = "]<]minimax[>["
_DSML = TaggedParameters(
    '<｜DSML｜invoke name="',
    "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="',
    "</｜DSML｜parameter>",
)
_CHANNELS = TaggedParameters(
    '<|open|>call tool="',
    "<|close|>call<|sep|>",
    '<|open|>argument key="',
    "<|close|>argument<|sep|>",
    name_ends="<|sep|>",
    key_ends="<|sep|>",
)
_PAIRS = TaggedParameters(
    "", "", "<arg_key>", "</arg_value>", name_ends="", key_ends="</arg_key>", value_opens="<arg_value>"
)


_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<|]+)")
_CHANNEL = re.compile(r"\s*(\w+)")
_PEOPLE = {"assistant", "user", "all"}
"""Recipients that are no tools."""


@dataclass(frozen=True, slots=True)
class _Part:
    header: str
    channel: str
    body: str
    closed: bool
    held: str = ""
    """A control token in the body."""


def harmony_turn(turn: TurnText, *, ended: bool) -> WholeTurn:
    """Parse a completion that starts after `<|start|>assistant`.

    Args:
        turn: the completion without its last stop token.
        ended: whether a stop token ended the completion.
    """
    content: list[str] = []
    thinking: list[str] = []
    calls: list[RawCall] = []
    for part in _parts(turn, ended=ended):
        recipient = _RECIPIENT.search(part.header)
        if recipient is not None and recipient.group(1) not in _PEOPLE:
            calls.append(_call(recipient.group(1), part))
        elif part.channel == "analysis":
            thinking.append(part.body)
        else:
            content.append(part.body)
    return WholeTurn("\n".join(filter(None, content)), "\n".join(filter(None, thinking)), tuple(calls))


def _call(name: str, part: _Part) -> RawCall:
    text = f"{part.header}<|message|>{part.body}"
    if not part.closed:
        error = "the call was not closed, so it was not run"
        return RawCall(name, part.body, status=CallStatus.UNCLOSED, error=error, text=text)
    if part.held:
        return replace(held(name, part.held), text=text)
    return replace(arguments_call(name, part.body), text=text)


def _parts(turn: TurnText, *, ended: bool) -> Iterator[_Part]:
    position = 0
    while position < len(turn.text):
        message = turn.find("<|message|>", position)
        if message < 0:
            if rest := turn.text[position:].strip():
                addressed = _RECIPIENT.match(rest)
                yield _Part(rest, "", "", False) if addressed else _Part("", "", rest, ended)
            return
        header = turn.text[position:message]
        body = message + len("<|message|>")
        ends = [(end, tag) for tag in (*_ENDS, "<|start|>") if (end := turn.find(tag, body)) >= 0]
        end, tag = min(ends) if ends else (len(turn.text), "")
        channel_at = header.rfind("<|channel|>")
        channel = _CHANNEL.match(header, channel_at + len("<|channel|>")) if channel_at >= 0 else None
        closed = tag in _ENDS or (not tag and ended)
        yield _Part(
            header, channel.group(1) if channel else "", turn.text[body:end], closed, turn.sampled(body, end)
        )
        position = end + (len(tag) if tag in _ENDS else 0)
        if turn.at("<|start|>", position):
            position += len("<|start|>")


# A mark precedes every tag, so that a value may contain any markup. A list is a row of `<item>` tags, an
# object has one tag for each key, and an argument without a value is left out. Values have no types, so the
# schema of the tool decides them.
_INVOKE_TAG = re.compile(r"invoke\s+name=[\"']?([^\"']*)[\"']?\s*\Z")


@dataclass(slots=True)
class _Node:
    tag: str
    text: str = ""
    children: list[tuple[str, Nested]] = field(default_factory=list[tuple[str, Nested]])

    def value(self) -> Nested:
        return tuple(self.children) if self.children or not self.text else self.text


@dataclass(frozen=True, slots=True)
class NestedTags:
    """Reads the calls of a block in which a mark precedes every tag."""

    mark: str

    def __call__(self, turn: TurnText, span: Span) -> Sequence[RawCall]:
        """Read every call of a block."""
        calls: list[RawCall] = []
        open_nodes: list[_Node] = []
        name = ""
        for tag, text, control in self._tags(turn, span):
            if control:
                return [*calls, held(name, control)]
            if not open_nodes:
                match = _INVOKE_TAG.match(tag)
                if match is None:
                    return [*calls, invalid(f'the call has no {self.mark}<invoke name="...">')]
                name = match.group(1).strip()
                open_nodes.append(_Node("invoke"))
            elif not tag.startswith("/"):
                if len(open_nodes) > MAX_DEPTH:
                    return [*calls, self._malformed(name, "its values are nested too deep")]
                open_nodes.append(_Node(tag.strip(), text))
            elif tag[1:].strip() != open_nodes[-1].tag:
                error = f"<{open_nodes[-1].tag}> is closed by <{tag}>"
                return [*calls, self._malformed(name, error)]
            else:
                node = open_nodes.pop()
                whole = node.text if node.children or not open_nodes else ""
                if stray := (whole.strip() or text.strip()):
                    return [*calls, stray_text(name, stray)]
                if open_nodes:
                    open_nodes[-1].children.append((node.tag, node.value()))
                else:
                    calls.append(self._call(name, node))
        if open_nodes:
            error = f"the call was not closed, so it was not run: end it with {self.mark}</invoke>"
            return [*calls, RawCall(name, status=CallStatus.UNCLOSED, error=error)]
        return calls or [invalid(f'the call has no {self.mark}<invoke name="...">')]

    def _tags(self, turn: TurnText, span: Span) -> Iterator[tuple[str, str, str]]:
        """Yield each tag with the text between it and the next one, and a control token in them."""
        start = turn.find(self.mark, span.start)
        while 0 <= start < span.end:
            following = turn.find(self.mark, start + len(self.mark))
            stop = following if 0 <= following < span.end else span.end
            tag, _, text = turn.text[start + len(self.mark) : stop].removeprefix("<").partition(">")
            control = turn.sampled(start + len(self.mark), stop, f"<{tag}>")  # a key may be any word
            yield tag, text, control
            start = following

    def _call(self, name: str, node: _Node) -> RawCall:
        if not name:
            return RawCall(status=CallStatus.MISSING_NAME, error="the call has no name")
        keys = [key for key, _ in node.children]
        if twice := [key for key in keys if keys.count(key) > 1]:
            return repeated(name, twice[0])
        return RawCall(name, untyped=dict(node.children))

    def _malformed(self, name: str, error: str) -> RawCall:
        message = f"the arguments of {name} cannot be read: {error}"
        return RawCall(name, status=CallStatus.BAD_ARGUMENTS, error=message)


def _indexed_name(before: str) -> tuple[str, str]:
    """Return the name and the id from `functions.NAME:0`."""
    match = re.fullmatch(r"(?:functions\.)?(.*?)(?::\d+)?", before, re.DOTALL)
    return (match.group(1) if match else before), before


def _tagged_id(before: str) -> tuple[str, str]:
    """Return the name and the id from `NAME[CALL_ID]ID`."""
    name, _, call_id = before.partition("[CALL_ID]")
    return name.strip(), call_id.strip()


def _tagged(name: str, read: TaggedParameters, *wrappers: tuple[str, str]) -> Grammar:
    """Return a grammar of calls with tagged parameters, which may stand without their wrapper too."""
    blocks = [Block(opens, closes, read) for opens, closes in wrappers]
    return Grammar(
        name,
        (*blocks, read.block),
        wrappers=tuple(closes for _, closes in wrappers),
        inner=(read.parameter_opens, read.parameter_closes),
    )


GRAMMARS: dict[str, Grammar] = {
    grammar.name: grammar
    for grammar in (
        Grammar("text"),
        Grammar(
            "harmony", whole=harmony_turn, inner=("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
        ),
        Grammar(
            "hermes",
            (Block("<tool_call>", "</tool_call>", one_json_call),),
            spell=lambda calls: "\n".join(f"<tool_call>\n{spell_json(call)}\n</tool_call>" for call in calls),
        ),
        Grammar(
            "granite",
            # Granite 3.1 and later write the second tag, whatever their templates show.
            (Block("<|tool_call|>", "", json_calls), Block("<tool_call>", "", json_calls)),
            spell=lambda calls: f"<|tool_call|>[{', '.join(map(spell_json, calls))}]",
        ),
        _tagged("function_xml", _FUNCTION, ("<tool_call>", "</tool_call>")),
        _tagged("seed_xml", replace(_FUNCTION, newlines=False), ("<seed:tool_call>", "</seed:tool_call>")),
        Grammar(
            "glm",
            (Block("<tool_call>", "</tool_call>", _PAIRS),),
            inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        _tagged("minimax", _INVOKE, ("<minimax:tool_call>", "</minimax:tool_call>")),
        Grammar(
            "minimax_m3",
            (Block(f"{_MARK}<tool_call>", f"{_MARK}</tool_call>", NestedTags(_MARK), f"{_MARK}</invoke>"),),
            inner=(_MARK,),
        ),
        _tagged("kimi_k3", _CHANNELS, ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")),
        _tagged(
            "dsml",
            _DSML,
            ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
            ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        ),
        Grammar(
            "deepseek_v3",
            (Block("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁end｜>", NamedJson("\n")),),
            wrappers=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            inner=("<｜tool▁sep｜>",),
        ),
        Grammar(
            "deepseek_v31",
            (Block("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", NamedJson("<｜tool▁sep｜>")),),
            wrappers=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            inner=("<｜tool▁sep｜>",),
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
            inner=("<|tool_call_argument_begin|>",),
        ),
        Grammar(
            "mistral_args",
            (Block("[TOOL_CALLS]", "", NamedJson("[ARGS]", _tagged_id)),),
            inner=("[ARGS]",),
        ),
        Grammar("mistral", (Block("[TOOL_CALLS]", "", json_calls),)),
        Grammar("gemma4", (Block("<|tool_call>", "<tool_call|>", NamedLiterals('<|"|>')),), inner=('<|"|>',)),
        Grammar(
            "functiongemma",
            (Block("<start_function_call>", "<end_function_call>", NamedLiterals("<escape>")),),
            inner=("<escape>",),
            untyped=True,
        ),
        Grammar("cohere", (Block("<|START_ACTION|>", "<|END_ACTION|>", json_calls),)),
        Grammar(
            "lfm",
            (Block("<|tool_call_start|>", "<|tool_call_end|>", pythonic_calls),),
            spell=lambda calls: f"<|tool_call_start|>{spell_pythonic(calls)}<|tool_call_end|>",
        ),
        Grammar("functionary_v31", (Block("<function=", "</function>", NamedJson(">")),)),
        Grammar("functionary_v32", whole=functionary_turn),
        Grammar("pythonic", bare=bare_pythonic, wrappers=("<|python_start|>", "<|python_end|>")),
        Grammar("bare_json", bare=bare_json, wrappers=("<|python_tag|>",)),
        Grammar("bare_literals", bare=bare_literals),
    )
}
"""The built-in grammars by name."""
