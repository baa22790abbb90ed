"""Learn from a template how calls are read, and what it writes around thinking, text and calls.

Turns are written through the template with known thinking, text and calls. Whatever else stands in them is
its own markup: tags of thinking, headers, and what closes a part. None of it is content when a turn is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from agentenv.core.errors import RenderError
from agentenv.render.control import SENTINEL
from agentenv.render.parse.choose import recognise
from agentenv.render.parse.grammar import Grammar
from agentenv.render.parse.turn import THINK_TAGS, Forms
from agentenv.render.tail import PROBE, PROBE_TOOL, USER, Kind, Plain, TailReader, TurnEnd, probe_call
from agentenv.render.write import TurnWriter

__all__ = ["FormLearner"]

_ARGUMENTS: Mapping[str, object] = {"city": "Pqz", "n": 37}
_MARKUP = "a < b & \"c\" > 'd'\n<e/>"
_ANSWER = ("<answer>", "</answer>")
"""Tags in which Hunyuan's models answer; they count where they are control tokens, or in the template."""


class FormLearner:
    """Learns the grammar and the forms of one template."""

    def __init__(self, reader: TailReader, ends: Mapping[Kind, TurnEnd]) -> None:
        self._reader = reader
        self._ends = ends
        self._forms = Forms(_opened(reader))

    def grammar(self) -> Grammar | None:
        """Return the grammar that parses a rendered call; some templates can only render one argument."""
        for keys in (("city", "n"), ("city",), ("n",)):
            arguments = {key: _ARGUMENTS[key] for key in keys}
            hard = {**arguments, **({"city": _MARKUP} if "city" in keys else {})}
            turns = [
                (self._written(count, values), [("get_weather", values)] * count)
                for values, count in ((arguments, 1), (arguments, 2), (hard, 1))
            ]
            if turns[0][0] and (found := recognise(turns, self._reader.control, self.forms(None))):
                return found
        return None

    def forms(self, grammar: Grammar | None) -> Forms:
        """Return what stands around thinking, text and calls in the turns of the template."""
        lead, _, trail = self._written(content=PROBE).partition(PROBE)
        opens, _, rest = self._written(content=PROBE, thinking=SENTINEL).partition(SENTINEL)
        between, _, after = rest.partition(PROBE)
        closes = self._closes(opens, between)
        tags = self._forms.tags
        if closes and not any(tag in opens for tag, _ in THINK_TAGS) and not self._forms.thinking_open:
            tags = (*tags, (opens.strip(), closes))
        forms = replace(self._forms, tags=tags)
        if grammar and grammar.whole:
            return forms
        leads = [_after(lead, forms.closes), between.partition(closes)[2] if closes else ""]
        leads += self._before_calls(grammar, forms, closes) if grammar else ()
        # The longest header is tried first, for it may begin with another one.
        leads = sorted({text.strip() for text in leads}, key=len, reverse=True)
        control = self._reader.control
        thinking = (tag for pair in tags for tag in pair)
        trails = [tag for text in (trail, after, *thinking) for tag in self._tags(text)]
        if grammar and (closes := next((block.closes for block in grammar.blocks), "")):
            trails += self._tags(self._written(1).rpartition(closes)[2])
        if all(tag in control.strings or tag in self._reader.template.source for tag in _ANSWER):
            leads.append(_ANSWER[0])
            trails.append(_ANSWER[1])
        headers = [text for text in leads if "get_weather" in text and text in control]
        others = {*control.find(_prompt(self._reader) + lead + opens + between), *trails}
        called = "".join(map(self._written, (1, 2))) if "call" in self._ends else ""
        return replace(
            forms,
            calls=tuple(
                string
                for string in dict.fromkeys(control.find(called))
                if string not in others and not self._stops(string)
            ),
            header=_pattern(min(headers, key=len)) if headers else "",
            leads=tuple(_pattern(text) for text in leads if text),
            trails=tuple(string for string in dict.fromkeys(filter(None, trails)) if not self._stops(string)),
        )

    def _before_calls(self, grammar: Grammar, forms: Forms, closes: str) -> Iterator[str]:
        """Yield what stands before a call: at the beginning, behind thinking, text and another call."""
        once, thought = self._written(1), self._written(1, thinking=SENTINEL)
        said, twice = self._written(1, content=PROBE), self._written(2)
        for block in grammar.blocks[:1]:
            ends = block.closes and once[once.find(block.closes, once.find(block.opens)) :]
            texts = (
                _after(once, forms.closes),
                thought.partition(SENTINEL)[2].partition(closes)[2] if closes else "",
                said.partition(PROBE)[2],
                twice.partition(block.closes)[2] if ends else "",
            )
            for text in texts:
                lead, found, _ = text.partition(block.opens)
                if found and (lead in self._reader.control or "get_weather" in lead):
                    yield lead

    def _closes(self, opens: str, between: str) -> str:
        """Return the tag that ends thinking; empty if there is none, or the prompt has it already."""
        known = [closes for _, closes in THINK_TAGS if closes in between]
        closes = next(iter(known or self._tags(between)), "")
        if not closes and not opens.strip():
            closes = between.strip().partition("\n")[0]
        return "" if closes and not opens.strip() and closes in _prompt(self._reader) else closes

    def _tags(self, text: str) -> list[str]:
        """Return the control strings of a text, those around a word as one tag: `<|close|>think<|sep|>`."""
        tags: list[str] = []
        end = -1
        for start, string in self._reader.control.positions(text):
            word = text[end:start] if tags else ""
            tags = [*tags[:-1], f"{tags[-1]}{word}{string}"] if word.isalpha() else [*tags, string]
            end = start + len(string)
        return tags

    def _stops(self, string: str) -> bool:
        return string in self._reader.stop_strings or any(string == end.end for end in self._ends.values())

    def _written(
        self,
        count: int = 0,
        arguments: Mapping[str, object] = _ARGUMENTS,
        *,
        content: str = "",
        thinking: str = "",
    ) -> str:
        """Return a turn as the model would sample it, without its end; empty if it cannot be written."""
        habits = self._reader.habits
        shaped = json.dumps(arguments) if habits.json_arguments else dict(arguments)
        function: Plain = {"name": "get_weather", "arguments": shaped}
        calls = [{**probe_call(i), "type": "function", "function": function} for i in range(count)]
        turn: Plain = {"role": "assistant", "content": content, "reasoning_content": thinking}
        if calls:
            turn["tool_calls"] = calls
            turn["content"] = None if habits.null_content and not content else content
        writer = TurnWriter(self._reader, self._ends["call" if calls else "text"], self._forms.thinking_open)
        try:
            text = writer.write(turn, [PROBE_TOOL]).text
        except RenderError:
            return ""
        return text[: self._reader.control.positions(text)[-1][0]]


def _prompt(reader: TailReader) -> str:
    """Return what the template writes behind the user's message; empty if it refuses the tools."""
    for tools in ([PROBE_TOOL], None):
        try:
            text = reader.render([{**USER, "content": PROBE}], tools=tools)
        except RenderError:
            continue
        return text[text.rfind(PROBE) + len(PROBE) :]
    return ""


def _opened(reader: TailReader) -> str:
    """Return the thinking tag that the generation prompt opens; empty if it opens none."""
    prompt = _prompt(reader)
    opened = (o for o, closes in THINK_TAGS if o in prompt and closes not in prompt[prompt.rfind(o) :])
    return next(opened, "")


def _after(text: str, tag: str) -> str:
    """Return what follows a tag; all of the text if it has none."""
    return text.partition(tag)[2] if tag and tag in text else text


def _pattern(text: str) -> str:
    """Return the pattern of a header, for any tool, any id and any white space."""
    escaped = re.sub(r"(?:\\\s)+", r"\\s*", re.escape(text)).replace("get_weather", r"[^<>\n]{0,100}")
    return re.sub(r"probe000\d", r"\\w{0,64}", escaped)
