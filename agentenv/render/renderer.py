"""The renderer turns messages into token ids by appending only, and token ids back into a message.

1. Sampled ids are never decoded and encoded again: `extend` returns only the ids after them.
2. The cost of `extend` depends on the new messages only, not on the length of the conversation.
3. No string from a message, a tool or a schema can become a control token.
4. Messages that a template cannot render exactly are refused with the reason and the remedy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from agentenv.core.errors import RenderError
from agentenv.core.messages import CallStatus, JsonValue, Message, ToolCall, orphans_as_user, text_of
from agentenv.core.sequence import Prompt, images_of
from agentenv.render.control import Marker, Neutraliser
from agentenv.render.diagnosis import Diagnosis, diagnose, with_grammar
from agentenv.render.origin import OriginCheck, PieceEncoder
from agentenv.render.parse.choose import written_calls
from agentenv.render.parse.grammar import Grammar, ToolIndex, TurnText
from agentenv.render.parse.turn import TurnReader
from agentenv.render.protocol import ParsedTurn, ReplyForm, TemplateReport
from agentenv.render.shape import answered, nine, parted, renamed, shaped, strings, taken_ids
from agentenv.render.tail import FIRST, USER, Cut, Kind, Plain, TailReader
from agentenv.render.tokenizer import ChatTokenizer
from agentenv.render.vision.splice import Splicer
from agentenv.render.write import TurnWriter, refuse_other

if TYPE_CHECKING:
    from agentenv.render.follow import TurnFollower
    from agentenv.render.text_protocol import TextProtocol

__all__ = ["Renderer"]

_FOREIGN = "a call in the text was not run: write it in the format of your instructions"
_TRIM_MARK = "\n... [{cut} characters cut] ...\n"


class Renderer:
    r"""Render the chats of one model; a renderer is bound to the tools of one episode.

    Args:
        tokenizer: a `ChatTokenizer`, or a fast tokenizer or processor of transformers.
        tools: tool schemas in OpenAI's shape.
        chat_template: Jinja source to use in place of the tokenizer's template.
        stop_token_ids: ids that end generation, in addition to those of the tokenizer.
        template_kwargs: values for the template, such as `enable_thinking`.
        protocol: always describe tools in plain text, in the way that this protocol says; if None, the
            renderer does so only where the template has no place for tools.
        grammar: how the model writes calls: a name (`agentenv.render.parse.GRAMMARS`) or a grammar of
            your own; if None, the grammar that the doctor recognised.

    Raises:
        UsageError: There is no grammar of this name.

    Example:
        >>> from agentenv.render import Renderer, byte_tokenizer
        >>> renderer = Renderer(byte_tokenizer())
        >>> prompt = renderer.start([{"role": "user", "content": "hi"}])
        >>> renderer.decode(prompt)
        '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer | object,
        tools: Sequence[Mapping[str, JsonValue]] = (),
        chat_template: str | None = None,
        stop_token_ids: Sequence[int] = (),
        template_kwargs: Mapping[str, object] | None = None,
        *,
        protocol: TextProtocol | None = None,
        grammar: str | Grammar | None = None,
    ) -> None:
        self.tokenizer = ChatTokenizer.of(tokenizer)
        self._given_protocol = protocol
        template = chat_template or self.tokenizer.chat_template
        diagnosis = diagnose(
            self.tokenizer,
            template,
            stop_token_ids,
            template_kwargs or {},
            text_protocol=protocol is not None,
            grammar_named=grammar is not None,
        )
        if grammar is not None:
            diagnosis = with_grammar(diagnosis, grammar)
        self._diagnosis: Diagnosis = diagnosis
        self._encoder = PieceEncoder(self.tokenizer, self._diagnosis.control)
        reader = diagnosis.reader
        self._origin = OriginCheck(diagnosis.control, self.tokenizer, reader.template if reader else None)
        self._names = {token_id: string for string, token_id in self._diagnosis.control.strings.items()}
        self.report: TemplateReport = self._diagnosis.report
        self.stop_token_ids: tuple[int, ...] = self._diagnosis.stop_token_ids
        self._set_tools(tools)

    def bind(self, tools: Sequence[Mapping[str, JsonValue]]) -> Renderer:
        """Return a renderer for these tool schemas; both renderers share one diagnosis."""
        bound = copy.copy(self)
        bound._set_tools(tools)  # noqa: SLF001 - of the same class
        return bound

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id of the tokenizer."""
        return self.tokenizer.id_limit

    @property
    def takes_images(self) -> bool:
        """Whether messages may have images."""
        return self.tokenizer.images is not None

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Render the first prompt of an episode; nothing later in the episode is rendered in full.

        A last message of the assistant is the beginning of the reply, which is left open. With images, the
        ids are an `agentenv.core.images.Prompt`, which says where they are.

        Raises:
            RenderError: The template refuses these messages, or an image cannot be shown.
        """
        said, begun = parted(messages)
        ids = self._start(said)
        return Prompt([*ids, *self._begun(begun)], images_of(ids)) if begun else ids

    def _start(self, messages: Sequence[Message]) -> list[int]:
        try:
            return self._opening(messages)
        except RenderError:
            # Some templates refuse the answer to a call that could not be read and is no call of its message.
            told = orphans_as_user(messages)
            if self._uses_protocol or list(told) == list(messages):
                raise
            return self._opening(told)

    def _opening(self, messages: Sequence[Message]) -> list[int]:
        reader = self._reader()
        images = self._splicer(messages)
        shaped = [self._shaped(message, images) for message in messages]

        def draw(marker: Marker) -> Cut:
            plain = [marker.message(message) for message in shaped]
            tools = self._marked_tools(marker)
            if self._uses_protocol:
                plain = self._protocol.plain(
                    plain, tools, system_role=reader.habits.system_role, opening=True
                )
                tools = []
            return Cut("", reader.render(plain, tools=tools))

        _, pieces = self._origin.pieces(draw, strings([*shaped, *self.tools]), None)
        return images.encode(pieces, self._encoder.start, partial(self._encoder.after, ""))

    def extend(
        self,
        sampled_ids: Sequence[int],
        tool_calls: Sequence[ToolCall],
        new_messages: Sequence[Message],
        history: Sequence[Message] | None = None,
    ) -> list[int]:
        """Return the ids to append after the sampled ones, up to the next generation prompt.

        Args:
            sampled_ids: the completion as sampled; only its last id is used.
            tool_calls: the calls of the completion; only those that the new messages answer are used.
            new_messages: tool results and other messages that follow the completion.
            history: the messages before the completion; needed only if the verdict is `history`.

        Raises:
            RenderError: The template cannot render these messages after the completion.
        """
        new_messages, begun = parted(new_messages)
        ids = self._extend(sampled_ids, tool_calls, new_messages, history)
        return Prompt([*ids, *self._begun(begun)], images_of(ids)) if begun else ids

    def _extend(
        self,
        sampled_ids: Sequence[int],
        tool_calls: Sequence[ToolCall],
        new_messages: Sequence[Message],
        history: Sequence[Message] | None,
    ) -> list[int]:
        reader = self._reader()
        images = self._splicer(new_messages)
        new = [self._shaped(message, images) for message in new_messages]
        calls = [] if self._uses_protocol else answered(tool_calls, new_messages)
        if reader.habits.nine_ids:
            calls = [{**call, "id": nine(call["id"])} for call in calls]
        before: list[Plain] = []
        if with_history := self.report.verdict == "history":
            before = self._before(history)
            taken = taken_ids(before)
            calls, new = renamed(calls, "id", taken), renamed(new, "tool_call_id", taken)
        with_tools = with_history or reader.habits.tools_needed
        kind: Kind = "call" if calls else "text"
        last = self._names.get(sampled_ids[-1], "") if len(sampled_ids) else ""
        if not last and len(sampled_ids) and sampled_ids[-1] in self.stop_token_ids:
            last = self._diagnosis.ends[kind].end

        def draw(marker: Marker) -> Cut:
            marked = [marker.message(message) for message in new]
            if self._uses_protocol:
                marked = self._protocol.plain(
                    marked, (), system_role=reader.habits.system_role, opening=False
                )
            tail = reader.tail(
                [marker.message(call) for call in calls],
                marked,
                before=[marker.message(message) for message in before] or (USER,),
                tools=self._marked_tools(marker) if with_tools else None,
            )
            return reader.cut(self._diagnosis.ends[kind], tail, last)

        texts = strings([*calls, *new, *before, *(self.tools if with_tools else ())])
        shape = None if with_history else (last, len(calls), *((m["role"], not m["content"]) for m in new))
        after, pieces = self._origin.pieces(draw, texts, shape)
        if FIRST in "".join(pieces) and not any(FIRST in text for text in texts):
            raise RenderError(
                "after these messages the template writes the first message again, which is not known here",
                remedy="pass a chat_template that writes each message once",
            )
        return images.encode(pieces, partial(self._encoder.after, after), partial(self._encoder.after, ""))

    def parse(self, token_ids: Sequence[int]) -> ParsedTurn:
        """Parse a completion; text that the model wrote wrongly never raises an error."""
        ids = list(token_ids)
        while ids and ids[-1] in self._reading.end_ids:
            ids.pop()
        turn = TurnText.decode(ids, self.tokenizer, self._diagnosis.control, self._names)
        parsed = self._reading.read(turn, self._tool_index, ended=len(ids) < len(token_ids))
        if parsed.tool_calls:
            return parsed
        said = text_of(parsed.message) or parsed.message.get("reasoning_content", "")
        foreign = written_calls(said, self._tool_index, ids)
        told = [replace(call, status=CallStatus.INVALID_JSON, error=_FOREIGN) for call in foreign]
        return replace(parsed, tool_calls=tuple(told))

    def write(self, message: Message) -> list[int]:
        """Return the ids of a turn of the assistant as the model would sample it, with its stop token.

        Raises:
            RenderError: The template refuses the message, or what it writes reads back as another one.
        """
        reader = self._reader()
        shaped = self._shaped(message, self._splicer([message]))
        kind: Kind = "call" if message.get("tool_calls") and not self._uses_protocol else "text"
        writer = TurnWriter(reader, self._diagnosis.ends[kind], self._diagnosis.forms.thinking_open)

        def draw(marker: Marker) -> Cut:
            marked = marker.message(shaped)
            if not self._uses_protocol:
                return writer.write(marked, self._marked_tools(marker))
            (plain,) = self._protocol.plain(
                [marked], (), system_role=reader.habits.system_role, opening=False
            )
            return writer.write(plain, ())

        shape = ("written", len(message.get("tool_calls", ())), *(not value for value in shaped.values()))
        after, pieces = self._origin.pieces(draw, strings([shaped, *self.tools]), shape)
        ids = self._encoder.after(after, pieces if after else ["", *pieces])
        refuse_other(message, self.parse(ids))
        return ids

    def grammar(self, form: ReplyForm) -> str:
        """Return the grammar of replies that have a form; see `agentenv.engine.Sampling.grammar`.

        Raises:
            RenderError: No grammar is known for the way in which this model writes.
        """
        from agentenv.render.reply_grammar import reply_grammar

        return reply_grammar(form, self._reading, self._tool_index, self._diagnosis.control)

    def follow(self, stop: Sequence[str] = ()) -> TurnFollower:
        """Return what reads a completion while it is sampled; `stop` are texts that cut its content off."""
        from agentenv.render.follow import TurnFollower

        return TurnFollower(self._reading, self.tokenizer, self._names, stop)

    def count(self, text: str) -> int:
        """Return how many tokens an untrusted text takes when it is rendered."""
        return len(self._encode_untrusted(text))

    def trim(self, text: str, max_tokens: int) -> str:
        """Cut text to at most `max_tokens` tokens: its head and its tail with a marker between them.

        A long text is cut by characters first, so that only its two ends have to be encoded.
        """
        window = max(64, 16 * max_tokens)
        if len(text) <= window and self.count(text) <= max_tokens:
            return text
        head_ids = self._encode_untrusted(text[:window])
        tail_ids = self._encode_untrusted(text[-window:])
        if len(text) <= 2 * window and self.count(text) <= max_tokens:
            return text
        room = max_tokens
        for _ in range(64):
            mark_cost = self.count(_TRIM_MARK.format(cut=len(text)))
            keep = room - mark_cost
            head = self._whole(head_ids[: (keep + 1) // 2]) if keep > 0 else ""
            tail = self._whole(tail_ids[len(tail_ids) - keep // 2 :]) if keep > 1 else ""
            kept = len(head) + len(tail)
            trimmed = head + _TRIM_MARK.format(cut=len(text) - kept) + tail
            over = self.count(trimmed) - max_tokens
            if over <= 0:
                return trimmed
            if keep <= 0:
                break
            room -= over
        return self._whole(head_ids[: max(0, max_tokens)])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode token ids to text that shows control tokens."""
        return self.tokenizer.decode(token_ids)

    @property
    def _protocol(self) -> TextProtocol:
        """The text protocol, which is loaded for the few templates that cannot show tools."""
        from agentenv.render.text_protocol import TextProtocol

        return self._given_protocol or TextProtocol()

    @property
    def _uses_protocol(self) -> bool:
        return self.report.verdict == "no_tool_role"

    def _set_tools(self, tools: Sequence[Mapping[str, JsonValue]]) -> None:
        self.tools = tuple(tools)
        self._tool_index = ToolIndex.of(self.tools)
        self._reading = TurnReader(
            self._diagnosis.grammar,
            self._diagnosis.control.strings,
            frozenset(self.stop_token_ids),
            self._diagnosis.forms,
        )

    def _reader(self) -> TailReader:
        if self._diagnosis.reader is None:
            raise RenderError("; ".join(self.report.reasons), remedy=self.report.remedy)
        return self._diagnosis.reader

    def _begun(self, text: str) -> list[int]:
        """Return the ids of text with which a reply begins.

        Raises:
            RenderError: The template opens thinking first, so the text would be thinking.
        """
        if self._diagnosis.forms.thinking_open:
            raise RenderError(
                "the template opens thinking before each reply, so a reply cannot be begun with text",
                remedy="send no message of the assistant last, or switch thinking off in the template",
            )
        return self._encode_untrusted(text)

    def _before(self, history: Sequence[Message] | None) -> list[Plain]:
        """Return the messages before the completion, for a template whose turns depend on them."""
        if history is None:
            raise RenderError(
                "the turns of this template depend on earlier messages",
                remedy="pass history=, the messages before the completion",
            )
        before = list(history)
        while before and before[-1]["role"] == "assistant":
            before.pop()
        # What stands before the completion is not encoded, so its images need no more than a place.
        images = self._splicer(before)
        return [self._shaped(message, images) for message in before]

    def _splicer(self, messages: Sequence[Message]) -> Splicer:
        texts: Sequence[str] = ()
        if any(isinstance(message.get("content"), list) for message in messages):
            # Without the images themselves, whose text is long and no part of what is rendered.
            texts = strings(
                [*({**message, "content": text_of(message)} for message in messages), *self.tools]
            )
        return Splicer(self.tokenizer.images, self.tokenizer.no_images, texts)

    def _marked_tools(self, marker: Marker) -> list[Mapping[str, object]]:
        return cast("list[Mapping[str, object]]", marker.value(self.tools))

    def _shaped(self, message: Message, images: Splicer) -> Plain:
        """Return a message in the form that the template expects."""
        return shaped(message, images.text(message), self._reader().habits, as_text=self._uses_protocol)

    def _encode_untrusted(self, text: str) -> list[int]:
        neutral = Neutraliser(self._diagnosis.control, self.tokenizer, [text])
        return self._encoder.after("", neutral.split(neutral.text(text)))

    def _whole(self, token_ids: Sequence[int]) -> str:
        """Decode a slice of ids and drop the characters that the slice cut in half."""
        return self.tokenizer.decode(token_ids).strip("\ufffd")
