"""Parse a completion: find the thinking, read the calls by a grammar, and keep the rest as content."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from itertools import chain, islice

from agentenv.core.messages import MAX_ARGUMENT_CHARS, CallStatus, Message, ToolCall
from agentenv.core.refusals import unknown_tool
from agentenv.render.parse.grammar import BareReader, Block, Grammar, RawCall, Span, ToolIndex, TurnText, held
from agentenv.render.parse.json_calls import too_deep
from agentenv.render.protocol import ParsedTurn

__all__ = ["NO_FORMS", "THINK_TAGS", "Forms", "TurnReader"]

THINK_TAGS = (
    ("<think>", "</think>"),
    ("<mm:think>", "</mm:think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
)
"""Pairs of tags with which models mark their thinking."""

_READABLE = (CallStatus.OK, CallStatus.UNKNOWN_TOOL)
"""Statuses of calls that have a name and a JSON object, so that messages can hold them as calls."""
_UNCLOSED = "the call was not closed, so it was not run: end it with {closes}"
_STRAY = "{tag} belongs to a call, but no call with it could be read: write the whole call again"
_NOT_THOUGHT = (
    "the call stands in thinking that was not closed, so it was not run: end the thinking with {closes}"
)
_BEFORE = "the call stands before the end of thinking, so it was not run: write it after your thinking"
_MAX_HEADER = 200
"""Characters before a call in which its header may stand."""
_MAX_BARE = 16
"""Most places of a turn that are tried as the beginning of bare calls."""
_SPACE = re.compile(r"\s*")
_BARE = re.compile(
    r"(?:^|(?<=[\s.:!?])|"
    r"(?P<tag>```(?:json)?\s*|<\|?\w+\|?>\s*|\[[A-Z_]+\]))(?:functools)?(?=[\[{])",
    re.MULTILINE,
)
_BARE_CLOSES = re.compile(r"\s*(?:```|</?\|?\w+\|?>)")
_CLOSED, _OPENS = re.compile(r"[}\]]"), re.compile(r"[{\[]")


@dataclass(frozen=True, slots=True)
class Forms:
    """What a template writes around the thinking, the text and the calls of a turn."""

    thinking_open: str = ""
    """The thinking tag that the generation prompt opens; empty if it opens none."""
    tags: tuple[tuple[str, str], ...] = THINK_TAGS
    """Pairs of tags around thinking; without an opening tag, thinking that is closed begins with its turn."""
    leads: tuple[str, ...] = ()
    """Patterns of headers; one at the beginning of a turn, behind thinking or before a call is no content.
    One with a control token is no content anywhere."""
    header: str = ""
    """Pattern of the header that names the tool before its call; a call without it is quoted."""
    trails: tuple[str, ...] = ()
    """What stands behind text: at the end of a turn, and control tokens anywhere."""
    calls: tuple[str, ...] = ()
    """Control tokens of turns with calls that no other turn has."""

    @property
    def closes(self) -> str:
        """The tag that ends the thinking that the prompt opens."""
        return dict(self.tags).get(self.thinking_open, "")


NO_FORMS = Forms()


@dataclass(frozen=True, slots=True)
class TurnReader:
    """Parses the completions of one template."""

    grammar: Grammar
    control: Mapping[str, int]
    end_ids: frozenset[int]
    """Stop tokens and closers, which are not part of the text if they are at its end."""
    forms: Forms = NO_FORMS

    def read(self, turn: TurnText, tools: ToolIndex, *, ended: bool = True) -> ParsedTurn:
        """Return the parsed turn; text that the model wrote wrongly never raises an error.

        Args:
            turn: the completion without its last stop token.
            tools: the episode's tools.
            ended: whether a stop token ended the completion.
        """
        if self.grammar.whole is not None:
            whole = self.grammar.whole(turn, ended=ended)
            found = [tag for tag in self.grammar.syntax if tag in whole.content and turn.find(tag) >= 0]
            found += self._torn(turn, [whole.content], ended=ended)
            return _parsed(turn, whole.content, whole.thinking, [*whole.calls, *_strays(found)], tools)
        thinking = self._thinking(turn, ended=ended)
        lacks = self._lacks(turn, thinking) if ended else ""
        calls, taken = self._calls(turn, thinking, lacks, ended=ended)
        if not ended:
            calls = [self._cut(call) if index == len(calls) - 1 else call for index, call in enumerate(calls)]
        # Thinking that is empty ends where a call begins, so it comes first.
        away = sorted([*thinking, *self._frame(turn, taken, thinking), *taken], key=_start)
        left = _between(away, len(turn.text))
        # What is wrong with a call that was not closed is said already.
        if all(call.status is not CallStatus.UNCLOSED for call in calls):
            searched = [*left, *thinking[-1:]] if lacks else left
            torn = self._torn(turn, [turn.text[span.start : span.end] for span in searched], ended=ended)
            known = sorted([*thinking, *taken], key=_start)
            calls += _strays(chain(self._strayed(turn, searched, known, calls), torn))
        content = _text(turn, left)
        if ended and not content and all(call.status is CallStatus.IN_THINKING for call in calls):
            # Nothing else is said, so the model waits for the result.
            calls = [replace(call, status=CallStatus.UNCLOSED, error=_BEFORE) for call in calls]
        if self.grammar.untyped:
            calls = [replace(call, untyped=call.untyped or call.parsed, is_text={}) for call in calls]
        return _parsed(turn, content, self._thoughts(turn, thinking), calls, tools)

    def _thoughts(self, turn: TurnText, thinking: Sequence[Span]) -> str:
        return "\n".join(filter(None, (self._inside(turn, span) for span in thinking)))

    def _lacks(self, turn: TurnText, thinking: Sequence[Span]) -> str:
        """Return the tag that the last thinking lacks where the turn ends in it; empty if it lacks none."""
        if not thinking or thinking[-1].end < len(turn.text):
            return ""
        opens = self._opener(turn, thinking[-1])
        closes = dict(self.forms.tags)[opens] if opens else self.forms.closes
        return "" if turn.at(closes, len(turn.text) - len(closes)) else closes

    def _tags(self, turn: TurnText, *, learned: bool) -> tuple[str, ...]:
        """Return the tags of the call format and the control tokens in them, also those that were learned."""
        inside = (string for tag in self.grammar.syntax for _, string in turn.inside(tag))
        return tuple(dict.fromkeys((*self.grammar.syntax, *inside, *(self.forms.calls if learned else ()))))

    def _strayed(
        self, turn: TurnText, left: Sequence[Span], known: Sequence[Span], calls: Sequence[RawCall]
    ) -> Iterator[str]:
        """Yield the tags and the headers of calls that no call took.

        Args:
            turn: the completion.
            left: what is text.
            known: the thinking and the calls in order.
            calls: the calls; beside one that can run, a wrapper that is left over says nothing.
        """
        live = any(call.status is CallStatus.OK for call in calls)
        for tag in self._tags(turn, learned=not live):
            yield from (tag for span in left if 0 <= turn.find(tag, span.start) < span.end)
        for span in _between(known, len(turn.text)) if self.forms.header else ():
            text = turn.text[span.start : span.end].rstrip()
            for match in re.finditer(self.forms.header, text):
                called = match.end() == len(text) and span.end < len(turn.text)
                if not called and not any(re.fullmatch(lead, match.group()) for lead in self._own_leads):
                    yield match.group()

    def _torn(self, turn: TurnText, texts: Sequence[str], *, ended: bool) -> Iterator[str]:
        """Yield what is there of tags that lack their beginning or end; a turn that was cut lacks ends."""
        tags = self._tags(turn, learned=True)
        for text in texts if tags else ():
            for match in _torn_tags(tags).finditer(text):
                if ended or match.end() < len(text.rstrip()):
                    yield match.group()
            for tag in tags:
                ends = (tag[at:] for at in range(1, len(tag) - _least(tag) + 1))
                yield from (end for end in ends if text.startswith(end))

    @property
    def _own_leads(self) -> list[str]:
        """The headers that name no tool."""
        return [lead for lead in self.forms.leads if not self.forms.header or self.forms.header not in lead]

    def _cut(self, call: RawCall) -> RawCall:
        """Return the last call of a turn that was cut off, as unclosed if it is not valid JSON."""
        if call.status is not CallStatus.INVALID_JSON or any(block.closes for block in self.grammar.blocks):
            return call
        return replace(call, status=CallStatus.UNCLOSED, error="the call was cut off, so it was not run")

    def _thinking(self, turn: TurnText, *, ended: bool) -> list[Span]:
        """Return the spans of thinking in order, tags included."""
        spans: list[Span] = []
        position = 0
        if closes := self.forms.closes:  # the thinking begins with the turn
            position = self._end(turn, closes, 0)
            if turn.find(closes) < 0 and not self.forms.thinking_open:
                position = 0
            elif turn.find(closes) < 0 and ended:
                position = self._last_calls(turn)
            spans += [Span(0, position)] if position else []
        first = len(turn.text) - len(turn.text.lstrip())
        while True:
            openers = [
                (start, pair)
                for pair in self.forms.tags
                if pair[0] and (start := self._opens(turn, pair[0], position, first)) >= 0
            ]
            if not openers:
                return spans
            start, (opens, closes) = min(openers)
            position = self._end(turn, closes, start + len(opens))
            spans.append(Span(start, position))

    def _opener(self, turn: TurnText, span: Span) -> str:
        """Return the tag that opens thinking; empty if none does."""
        return next((tag for tag, _ in self.forms.tags if tag and turn.at(tag, span.start)), "")

    def _last_calls(self, turn: TurnText) -> int:
        """Return where the calls begin with which a turn begins or ends; its length if it does neither.

        A model that thinks since its prompt and does so has not thought, or has left out the closing tag.
        """
        begins = len(turn.text)
        wrapped = re.compile("|".join(map(re.escape, self.grammar.wrappers)))
        found = self._region(turn, Span(0, begins))
        if all(call.status is CallStatus.OK for _, calls in found for call in calls):
            if found and not wrapped.sub("", turn.text[: found[0][0].start]).strip():
                return 0
            for span, _ in reversed(found):
                if wrapped.sub("", turn.text[span.end : begins]).strip():
                    break
                begins = span.start
        return begins

    def _frame(self, turn: TurnText, calls: Sequence[Span], thinking: Sequence[Span]) -> list[Span]:
        """Return the spans of what the template writes around text, where no call or thinking overlaps it."""
        inside = sorted((span.start, span.end) for span in (*calls, *thinking))
        tags = self._tags(turn, learned=not calls)
        # A header may share control tokens with the tags of calls, but it holds none of the tags.
        whole = (*self.grammar.syntax, *(() if calls else self.forms.calls))
        found = [*self._heads(turn, calls)]
        for span in self._markup(turn, thinking):
            text = turn.text[span.start : span.end].strip()
            if text not in tags and not any(tag in text for tag in whole):
                found.append(span)
        kept: list[Span] = []
        for span in sorted(found, key=lambda span: (span.start, -span.end)):
            at = bisect_right(inside, (span.start, len(turn.text)))
            free = not at or inside[at - 1][1] <= span.start
            free = free and (at == len(inside) or span.end <= inside[at][0])
            if free and (not kept or kept[-1].end <= span.start):
                kept.append(span)
        return kept

    def _heads(self, turn: TurnText, calls: Sequence[Span]) -> Iterator[Span]:
        """Yield the headers before calls, and the wrappers beside them."""
        text = turn.text
        wrappers = [re.escape(wrapper) for wrapper in self.grammar.wrappers]
        follows = re.compile(rf"\s*(?:{'|'.join(wrappers) or '(?!)'})")
        for span in calls:
            begin = max(0, span.start - _MAX_HEADER)
            window = text[begin : span.start]
            heads = (re.search(rf"(?:{lead})\s*\Z", window) for lead in (*self.forms.leads, *wrappers))
            yield from (Span(begin + head.start(), span.start) for head in heads if head)
            if tail := follows.match(text, span.end):
                yield Span(span.end, tail.end())

    def _markup(self, turn: TurnText, thinking: Sequence[Span]) -> Iterator[Span]:
        """Yield headers at the beginning and behind thinking, and the trail at the end.

        Headers and trails that have control tokens are markup anywhere.
        """
        leads = self._own_leads
        for start in (0, *(span.end for span in thinking)):
            letter = space.end() if (space := _SPACE.match(turn.text, start)) else start
            heads = (re.compile(lead).match(turn.text, letter) for lead in leads)
            yield from (Span(letter, head.end()) for head in heads if head)
        for lead in leads:
            matches = (match.span() for match in re.finditer(lead, turn.text))
            yield from (Span(*span) for span in matches if turn.sampled(*span))
        for trail in self.forms.trails:
            last = len(turn.text.rstrip()) - len(trail)
            if last >= 0 and turn.at(trail, last):
                yield Span(last, len(turn.text))
            position = -1
            while turn.inside(trail) and (position := turn.find(trail, position + 1)) >= 0:
                yield Span(position, position + len(trail))

    def _opens(self, turn: TurnText, tag: str, position: int, first: int) -> int:
        """Return where the thinking tag opens, or -1.

        A tag that begins with a control token counts anywhere, plain text only at the `first` letter.
        """
        if turn.begins_with_control(tag):
            return turn.find(tag, position)
        return first if position <= first and turn.at(tag, first) else -1

    def _end(self, turn: TurnText, closes: str, position: int) -> int:
        end = turn.find(closes, position)
        return len(turn.text) if end < 0 else end + len(closes)

    def _inside(self, turn: TurnText, span: Span) -> str:
        text = turn.text[span.start : span.end]
        for opens, closes in self.forms.tags:
            text = text.removeprefix(opens).removesuffix(closes)
        return text.strip("\n")

    def _calls(
        self, turn: TurnText, thinking: Sequence[Span], lacks: str, *, ended: bool
    ) -> tuple[list[RawCall], list[Span]]:
        """Return the calls and the spans of their blocks; `lacks` is the tag that the last thinking lacks."""
        outside = _between(thinking, len(turn.text))
        found = [block for region in outside for block in self._region(turn, region, ended=ended)]
        taken = [span for span, _ in found]
        begins = self._answer(turn, sorted([*thinking, *taken], key=_start))
        calls = [
            replace(call, status=CallStatus.UNCLOSED, error=_BEFORE, text=turn.text[span.start : span.end])
            if span.start < begins
            else call
            for span, read in found
            for call in read
        ]
        if not calls and not taken and self.grammar.bare is not None:
            bare = [block for region in outside for block in self._bare(turn, region, self.grammar.bare)]
            calls, taken = [call for _, read in bare for call in read], [span for span, _ in bare]
            if calls:
                return calls, taken
        status, error = CallStatus.IN_THINKING, ""
        for span in thinking:
            if lacks and span is thinking[-1]:  # the model may wait for the result
                status, error = CallStatus.UNCLOSED, _NOT_THOUGHT.format(closes=lacks)
            hidden = [call for _, read in self._region(turn, span) for call in read]
            calls += [replace(call, status=status, error=error, text="") for call in hidden]
        return calls, taken

    def _answer(self, turn: TurnText, spans: Sequence[Span]) -> int:
        """Return where the answer begins at the earliest: behind a tag that ends thinking nothing opened."""
        closers = [tag for pair in THINK_TAGS for tag in pair[1:] if {*pair} <= self.control.keys()]
        for region in reversed(_between(spans, len(turn.text))):
            if any(0 <= turn.find(closes, region.start) < region.end for closes in closers):
                return region.start
        return 0

    def _bare(self, turn: TurnText, region: Span, read: BareReader) -> list[tuple[Span, list[RawCall]]]:
        """Return calls without tags of their own with their spans: behind white space, a tag or a fence."""
        text = turn.text[region.start : region.end]
        found: list[tuple[Span, list[RawCall]]] = []
        broken: tuple[Span, list[RawCall]] | None = None
        position = tries = 0
        for match in _BARE.finditer(text):
            if match.end() < position or (tries := tries + 1) > _MAX_BARE:
                continue
            if (bare := read(text[match.end() :])) is None:
                continue
            calls, end = bare[0], match.end() + bare[1]
            span = Span(region.start + match.start(), region.start + end)
            if tag := turn.sampled(region.start + match.end(), span.end):
                calls = [held("", tag)]
            elif calls[-1].status is CallStatus.INVALID_JSON:
                broken = broken or (span, _with_text(calls, text[match.start() : end]))
                continue
            if match["tag"] and (closes := _BARE_CLOSES.match(text, end)):
                end = closes.end()
            position, span = end, replace(span, end=region.start + end)
            found.append((span, _with_text(calls, text[match.start() : end])))
        return found or ([broken] if broken else [])

    def _region(
        self, turn: TurnText, region: Span, *, ended: bool = False
    ) -> list[tuple[Span, list[RawCall]]]:
        """Return the blocks of a region with their calls; a turn that `ended` ends its last call, too."""
        found: list[tuple[Span, list[RawCall]]] = []
        position = region.start
        while True:
            openers = [
                (start, index)
                for index, block in enumerate(self.grammar.blocks)
                if 0 <= (start := turn.find(block.opens, position)) < region.end
            ]
            if not openers:
                return found
            start, index = min(openers)
            block = self.grammar.blocks[index]
            if not self._addressed(turn, start, found[-1][0].end if found else -1):
                position = start + len(block.opens)
                continue
            inside = Span(start + len(block.opens), region.end)
            end = self._block_end(turn, block, inside)
            if end is None:
                calls = self._unclosed(turn, block, inside, ended=ended)
                return [*found, (Span(start, region.end), _with_text(calls, turn.text[start : region.end]))]
            position = min(end + len(block.closes), region.end)
            calls = _with_text(block.read(turn, Span(inside.start, end)), turn.text[start:position])
            found.append((Span(start, position), calls))

    def _unclosed(self, turn: TurnText, block: Block, inside: Span, *, ended: bool) -> Sequence[RawCall]:
        """Return the calls of a block without its closing tag: those that end by themselves with the turn."""
        ends = ("}", "]", ")", *(other.closes for other in self.grammar.blocks if other.closes))
        if ended and inside.end == len(turn.text) and turn.text.rstrip().endswith(ends):
            calls = block.read(turn, inside)
            if all(call.status is CallStatus.OK for call in calls):
                return calls
        return [RawCall(status=CallStatus.UNCLOSED, error=_UNCLOSED.format(closes=block.closes))]

    def _addressed(self, turn: TurnText, start: int, last: int) -> bool:
        """Return whether a call stands where calls do: behind its header, or behind the last call's end."""
        if not self.forms.header or (last >= 0 and not turn.text[last:start].strip()):
            return True
        window = turn.text[max(0, start - _MAX_HEADER) : start]
        return re.search(rf"(?:{self.forms.header})\s*\Z", window) is not None

    def _block_end(self, turn: TurnText, block: Block, inside: Span) -> int | None:
        if not block.closes:
            following = turn.find(block.opens, inside.start)
            end = following if 0 <= following < inside.end else inside.end
            # Text behind the last bracket is no part of the call.
            behind = _CLOSED.split(turn.text[inside.start : end])
            return end - len(behind[-1]) if len(behind) > 1 and not _OPENS.search(behind[-1]) else end
        first = end = turn.find(block.closes, inside.start)
        while end >= 0 and not turn.text[max(inside.start, end - 64) : end].rstrip().endswith(block.last):
            end = turn.find(block.closes, end + 1)
        end = first if end < 0 else end
        return end if end >= 0 and end + len(block.closes) <= inside.end else None


def _parsed(
    turn: TurnText, content: str, thinking: str, calls: Sequence[RawCall], tools: ToolIndex
) -> ParsedTurn:
    # Calls that have no id get one that the tokens of the turn decide.
    seed = blake2b(repr(turn.token_ids).encode(), digest_size=16).digest() if calls else b""
    finished = [_finish(call, tools, seed, index) for index, call in enumerate(_distinct(calls))]
    written = [call.text for call in finished if call.text]
    message: Message = {"role": "assistant", "content": "\n".join(filter(None, (content, *written)))}
    if thinking:
        message["reasoning_content"] = thinking
    if good := [call.to_message() for call in finished if call.status in _READABLE]:
        message["tool_calls"] = good
    return ParsedTurn(message, tuple(finished))


def _strays(found: Iterable[str]) -> list[RawCall]:
    """Return a call that cannot be read for the first tag of the call format that no call took."""
    return [
        RawCall(status=CallStatus.INVALID_JSON, error=_STRAY.format(tag=tag), text="")
        for tag in islice(found, 1)
    ]


def _least(tag: str) -> int:
    """Return how many characters of a tag are taken for it."""
    return max(3, len(tag) // 2)


@cache
def _torn_tags(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Return what matches tags without their last character; at the end or before JSON, without more.

    Longer words are ordinary text, such as `</parameters>`, and so may be the beginning of a tag that ends
    with "=", such as `<functional>` in C++.
    """
    torn: list[str] = []
    for tag in tags:
        least, rest = _least(tag), ""
        for character in reversed(tag[least:-1]):
            rest = f"(?:{re.escape(character)}{rest})?"
        torn.append(rf"{re.escape(tag[:least])}{rest}(?=\s*(?:[\[{{]|\Z))")
        if not tag.endswith("="):
            torn.append(f"{re.escape(tag[:-1])}(?![\\w{re.escape(tag[-1])}])")
    return re.compile("|".join(torn))


def _with_text(calls: Sequence[RawCall], text: str) -> list[RawCall]:
    """Return the calls of one block with its text, if none of them can be read."""
    if any(call.status is CallStatus.OK for call in calls):
        return list(calls)
    return [replace(call, text="" if index else text.strip()) for index, call in enumerate(calls)]


def _written(call: RawCall) -> str:
    """Return the text of a call that cannot be read."""
    if call.text is not None:
        return call.text
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments}}}'


def _distinct(calls: Sequence[RawCall]) -> list[RawCall]:
    """Return the calls, without ids that repeat an earlier one: tool results refer to calls by id."""
    taken: set[str] = set()
    distinct: list[RawCall] = []
    for call in calls:
        distinct.append(replace(call, id="") if call.id in taken else call)
        taken.add(call.id)
    return distinct


def _start(span: Span) -> int:
    return span.start


def _between(spans: Sequence[Span], length: int) -> list[Span]:
    edges = [0, *chain.from_iterable((span.start, span.end) for span in spans), length]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [Span(start, end) for start, end in pairs if start < end]


def _text(turn: TurnText, left: Sequence[Span]) -> str:
    """Return the text of some spans, without the white space beside what stood between them."""
    if left == [Span(0, len(turn.text))]:
        return turn.text
    return "\n".join(filter(None, (turn.text[span.start : span.end].strip() for span in left)))


def _finish(call: RawCall, tools: ToolIndex, seed: bytes, index: int) -> ToolCall:
    call_id = call.id or blake2b(seed + index.to_bytes(4, "big"), digest_size=5).hexdigest()[:9]
    arguments, values = call.arguments, call.parsed
    if call.untyped is not None:
        arguments, values = tools.typed(call.name, call.untyped, call.is_text)
    status, error = call.status, call.error
    if status is CallStatus.OK and call.name not in tools.schemas:
        status, error = CallStatus.UNKNOWN_TOOL, unknown_tool(call.name, tools.schemas)
    elif status is CallStatus.OK and too_deep(arguments):
        status, error = CallStatus.BAD_ARGUMENTS, f"the arguments of {call.name} are nested too deep"
    if len(arguments) > MAX_ARGUMENT_CHARS:
        values = None  # the tool refuses arguments of this length and says why
    text = "" if status in (*_READABLE, CallStatus.IN_THINKING) else _written(call)
    return ToolCall(call_id, call.name, arguments, status, error, values, text)
