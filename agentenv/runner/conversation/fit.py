"""Cut the answer to a turn so that it fits into the tokens that are left.

Rules:

1. A completion gets at most the tokens that the limits of the turn, the episode and the context leave. If
   none are left, the engine is not called.
2. Only the content of tool results and other messages is cut, before the template adds its framing. Role
   headers, closing tokens and the next generation prompt are never cut; their tokens are counted first.
   Sampled tokens are never cut.
3. An image is whole, or a line of text says in its place what was left out. The last images go first, and
   an image whose message has a limit that it is over.
4. Content that fits exactly is not cut. If several contents are too long together, the longest are cut
   first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias, cast

from agentenv.core.limits import least
from agentenv.core.messages import ContentPart, Message, ToolResult, images_in, text_of
from agentenv.core.sequence import images_of

__all__ = ["CHARS_PER_TOKEN", "Keep", "Measure", "TurnAnswer", "cut", "fit_answer", "share"]

Keep: TypeAlias = Literal["middle", "head", "tail"]
"""How a long text is cut: `middle` removes its middle, `head` and `tail` keep only that end."""

_FIT_ROUNDS = 6
"""Attempts at an exact fit. Tokens may merge at the edges of a content, so sums of counts are estimates."""
_CUT_ROUNDS = 24
"""Attempts to find the longest cut of one text; each attempt at least halves the interval."""


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """The answer to one turn of the model: tool results in call order, then other messages."""

    results: tuple[ToolResult, ...] = ()
    messages: tuple[Message, ...] = ()
    trimmed_messages: int = 0
    """Number of messages, without the tool results, whose text was cut."""

    @property
    def all_messages(self) -> list[Message]:
        """The messages to append, in order."""
        return [*(result.to_message() for result in self.results), *self.messages]

    @property
    def texts(self) -> list[str]:
        """The texts that may be cut, one for each message; images are no text."""
        return [text_of(message) for message in self.all_messages]

    @property
    def image_counts(self) -> list[int]:
        """Number of images of each message."""
        return [images_in(message.get("content")) for message in self.all_messages]

    def without_image(self, index: int, tokens: int) -> TurnAnswer:
        """Return the answer with a line in the place of the last image of a message."""
        if index < len(self.results):
            result = self.results[index]
            cut = replace(result, content=_line_for_last(result.content, tokens), trimmed=True)
            return replace(self, results=(*self.results[:index], cut, *self.results[index + 1 :]))
        index -= len(self.results)
        message = self.messages[index]
        lined: Message = {**message, "content": _line_for_last(message.get("content"), tokens)}
        messages = (*self.messages[:index], lined, *self.messages[index + 1 :])
        return replace(self, messages=messages, trimmed_messages=self.trimmed_messages + 1)

    def with_texts(self, texts: Sequence[str]) -> TurnAnswer:
        """Return the answer with these contents; contents that differ are marked as trimmed."""
        split = len(self.results)
        results = tuple(map(_with_content, self.results, texts[:split]))
        messages = tuple(map(_with_text, self.messages, texts[split:]))
        changed = sum(new is not old for new, old in zip(messages, self.messages, strict=True))
        return TurnAnswer(results, messages, self.trimmed_messages + changed)


def _with_content(result: ToolResult, text: str) -> ToolResult:
    if text == result.text:
        return result
    full = len(result.text) if result.full_chars is None else result.full_chars
    return replace(result, content=_retold(result.content, text), trimmed=True, full_chars=full)


def _with_text(message: Message, text: str) -> Message:
    if text == text_of(message):
        return message
    return {**message, "content": _retold(message.get("content"), text)}


def _retold(content: str | list[ContentPart] | None, text: str) -> str | list[ContentPart]:
    """Return content with another text, which stands before its images."""
    if not isinstance(content, list):
        return text
    images = [part for part in content if part.get("type") != "text"]
    return [*([{"type": "text", "text": text}] if text else []), *images]


def _line_for_last(content: object, tokens: int) -> list[ContentPart]:
    """Return content with a line of text in the place of its last image."""
    parts = list(cast("list[ContentPart]", content))
    last = max(index for index, part in enumerate(parts) if part.get("type") == "image_url")
    parts[last] = {"type": "text", "text": f"[image left out: {tokens} tokens]"}
    return parts


def share(sizes: Sequence[int], budget: int) -> list[int]:
    """Divide a token budget: small contents get all they need, large ones get equal parts of the rest."""
    grants = [0] * len(sizes)
    left = max(budget, 0)
    order = sorted(range(len(sizes)), key=lambda index: sizes[index])
    for rank, index in enumerate(order):
        grants[index] = min(sizes[index], left // (len(order) - rank))
        left -= grants[index]
    return grants


def fit_answer(
    answer: TurnAnswer,
    render: Callable[[TurnAnswer], list[int]],
    measure: Measure,
    *,
    room: int | None,
    max_output_tokens: int | None,
    keep: Keep = "middle",
) -> tuple[TurnAnswer, list[int]] | None:
    """Cut the answer to a turn to its limits and render it.

    Args:
        answer: the answer to the turn.
        render: returns the ids to append, with the framing and the next generation prompt.
        measure: counts and cuts text.
        room: tokens that the answer may take with its framing; None means no limit.
        max_output_tokens: limit of one tool result.
        keep: part of a tool result that is kept when it is cut; other messages keep head and tail.

    Returns:
        The answer after cutting and its ids, or None if not even the framing fits.
    """
    limits = [least(result.max_tokens, max_output_tokens) for result in answer.results]
    if any(answer.image_counts):
        answer, limits = _fit_images(answer, render, limits, room)
    texts = answer.texts
    ceiling = least(room, *limits)
    if ceiling is None or sum(map(len, texts)) <= ceiling * MAX_CHARS_PER_TOKEN:
        # No content has more tokens than the whole answer, so one encoding is usually enough.
        ids = render(answer)
        if ceiling is None or len(ids) <= ceiling:
            return answer, ids
    limited = _cut_results(texts, limits, measure, keep)
    if room is None:
        answer = answer.with_texts(limited)
        return answer, render(answer)

    def shorten(grants: Sequence[int], sizes: Sequence[int]) -> TurnAnswer:
        """Cut each text to its grant, starting from the whole text so that the marker counts all cuts."""
        short = list(limited)
        for index, (grant, size) in enumerate(zip(grants, sizes, strict=True)):
            if grant < size:
                is_result = index < len(limits)
                short[index] = (
                    cut(texts[index], grant, measure, keep)
                    if is_result
                    else measure.trim(texts[index], grant)
                )
        return answer.with_texts(short)

    sizes = [
        measure.count(text) if len(text) <= room * MAX_CHARS_PER_TOKEN else len(text) for text in limited
    ]
    return _fit_context(shorten, sizes, render, room)


def _fit_images(
    answer: TurnAnswer,
    render: Callable[[TurnAnswer], list[int]],
    limits: Sequence[int | None],
    room: int | None,
) -> tuple[TurnAnswer, list[int | None]]:
    """Leave out images that do not fit; return the rest, and what the limits of results leave for text."""
    while any(answer.image_counts):
        ids = render(answer.with_texts([""] * len(answer.texts)))
        sizes = [image.length for image in images_of(ids)]
        last = {index: sum(answer.image_counts[: index + 1]) - 1 for index in _with_images(answer)}
        taken = {
            index: sum(sizes[at + 1 - answer.image_counts[index] : at + 1]) for index, at in last.items()
        }
        over = [
            index
            for index, limit in enumerate(limits)
            if limit is not None and index in taken and taken[index] > limit
        ]
        if not over and (room is None or len(ids) <= room):
            left = [None if one is None else one - taken.get(at, 0) for at, one in enumerate(limits)]
            return answer, left
        index = over[0] if over else max(last)
        answer = answer.without_image(index, sizes[last[index]])
    return answer, list(limits)


def _with_images(answer: TurnAnswer) -> list[int]:
    return [index for index, count in enumerate(answer.image_counts) if count]


def _cut_results(
    texts: Sequence[str], limits: Sequence[int | None], measure: Measure, keep: Keep
) -> list[str]:
    """Cut each tool result to its limit; the other texts, which follow the results, have no limit."""
    results = zip(texts, limits, strict=False)
    cuts = [text if limit is None else cut(text, limit, measure, keep) for text, limit in results]
    return [*cuts, *texts[len(limits) :]]


def _fit_context(
    shorten: Callable[[Sequence[int], Sequence[int]], TurnAnswer],
    sizes: Sequence[int],
    render: Callable[[TurnAnswer], list[int]],
    room: int,
) -> tuple[TurnAnswer, list[int]] | None:
    """Reduce the tokens granted to the contents until the whole answer fits with its framing."""
    blank = shorten([0] * len(sizes), [1] * len(sizes))
    frame = render(blank)
    if len(frame) > room:
        return None
    budget = room - len(frame)
    if sum(sizes) <= room:
        fitted = shorten(sizes, sizes)
        ids = render(fitted)
        if len(ids) <= room:
            return fitted, ids
    for _ in range(_FIT_ROUNDS):
        fitted = shorten(share(sizes, budget), sizes)
        ids = render(fitted)
        if len(ids) <= room:
            return fitted, ids
        budget -= len(ids) - room
        if budget <= 0:
            break
    return blank, frame


class Measure(Protocol):
    """Counts the tokens of a text and shortens it."""

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        ...

    def trim(self, text: str, max_tokens: int) -> str:
        """Return the text if it fits, else its head and tail around a marker."""
        ...


def cut(text: str, max_tokens: int, measure: Measure, keep: Keep = "middle") -> str:
    """Return the text if it has at most `max_tokens` tokens, else its kept part with a marker."""
    if max_tokens < 1:
        return ""
    window = MAX_CHARS_PER_TOKEN * max_tokens
    if len(text) <= window and measure.count(text) <= max_tokens:
        return text
    # Invariant: `fits` characters fit together with their marker, `over` characters do not.
    fits, over = 0, min(len(text), window) + 1
    if measure.count(_kept(text, 0, keep)) > max_tokens:
        return measure.trim(text, max_tokens)
    guess = over * 3 // 8
    for _ in range(_CUT_ROUNDS):
        if over - fits <= 1:
            break
        guess = min(max(guess, fits + 1), over - 1)
        size = measure.count(_kept(text, guess, keep))
        if size <= max_tokens:
            fits = guess
        else:
            over = guess
        step = (max_tokens - size) * max(guess, 1) // max(size, 1)
        guess = guess + step if step else (fits + over) // 2
    return _kept(text, fits, keep)


def _kept(text: str, chars: int, keep: Keep) -> str:
    """Return `chars` characters of the text, with a marker in place of the others."""
    tail = {"head": 0, "middle": chars // 2, "tail": chars}[keep]
    marker = f"... [{len(text) - chars} characters cut; to see them, ask for a smaller part] ..."
    parts = (text[: chars - tail], marker, text[len(text) - tail :])
    return "\n".join(part for part in parts if part)


CHARS_PER_TOKEN = 4
"""Average for English text and code; used for estimates, for example of what a chat API will count."""
MAX_CHARS_PER_TOKEN = 16
"""Upper bound on the average of any text. A text that is longer than this for each token it may have is cut
before it is encoded, so that a huge output costs no more time than a large one."""
