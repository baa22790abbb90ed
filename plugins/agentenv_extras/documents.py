"""Condense long documents passage by passage, also in the first messages of an episode.

1. A text is split into passages, which joined are the text again. Passages that are not condensed stay byte
   for byte, and so do the first and the last paragraph of a message, where the question usually stands.
2. A condensed passage becomes a numbered block, which the model can bring back with `recall_block`.
3. A model that summarises passages gets all of an episode at once. Equal passages, such as those that the
   members of a group share, are summarised once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentenv.core import Message, UsageError, derive_seed
from agentenv.engine import Answer, ChatEngine, Engine, Sampling, TextModel
from agentenv.render import Renderer
from agentenv.runner import Condenser, View
from agentenv_extras.passages import keywords_of, split_passages

__all__ = ["Keywords", "Passages", "SummarisePassages"]

_MAX_KEPT = 10_000
"""Largest number of summaries that are kept for other episodes."""


@dataclass(frozen=True, slots=True)
class _Passage:
    text: str
    is_long: bool
    """Whether the passage may be condensed."""


class Passages(Condenser):
    """Base class of condensers that shorten long messages passage by passage. Subclasses write `condense`.

    Messages of the user and of tools are condensed; system messages and the model's own are kept.

    Args:
        at: see `Condenser`.
        max_chars: largest number of characters of a passage.
        min_chars: passages shorter than this are kept.
        keep_ends: the first and the last paragraph of a message are kept if they have at most this many
            characters.
        pattern: regular expression of a passage's beginning; see `split_passages`.
        opening: also condense the first messages of an episode.

    Raises:
        UsageError: A number is out of range, or `pattern` is not a regular expression.
    """

    def __init__(
        self,
        *,
        at: float = 0.75,
        max_chars: int = 2000,
        min_chars: int = 200,
        keep_ends: int = 400,
        pattern: str = "",
        opening: bool = True,
    ) -> None:
        super().__init__(at=at)
        split_passages("", max_chars, pattern=pattern)  # refuses what cannot be used
        if min_chars < 50 or keep_ends < 0:
            raise UsageError(
                f"min_chars must be at least 50 and keep_ends 0 or more, not {min_chars} and {keep_ends}"
            )
        self.opening = opening
        self._max_chars, self._min_chars, self._keep_ends = max_chars, min_chars, keep_ends
        self._pattern = pattern
        self._condensed: set[str] = set()

    def fresh(self) -> Condenser:
        """Return a copy for one episode, which has condensed nothing yet."""
        condenser = super().fresh()
        vars(condenser).update(_condensed=set())
        return condenser

    async def condense(self, passages: Sequence[str]) -> Sequence[tuple[str, int]]:
        """Return for each passage a shorter text and the number of tokens that a model sampled for it."""
        raise NotImplementedError(f"{type(self).__name__} must write condense()")

    async def shorten(self, messages: Sequence[Message]) -> View | None:
        """Condense the long passages of all messages; a passage that would not become shorter is kept."""
        split = [self._split(message) for message in messages]
        long = [passage.text for passages in split for passage in passages if passage.is_long]
        if not long:
            return None
        answers = list(await self.condense(long))
        notes = iter([text for text, _ in answers])
        shown = tuple(
            self._shown(message, passages, notes) for message, passages in zip(messages, split, strict=True)
        )
        if shown == tuple(messages):
            return None
        return View(shown, "passages", written_tokens=sum(tokens for _, tokens in answers))

    def _shown(self, message: Message, passages: Sequence[_Passage], notes: Iterator[str]) -> Message:
        """Return what the view shows of a message."""
        content = "".join(
            self._note(passage.text, next(notes)) if passage.is_long else passage.text for passage in passages
        )
        if not passages or content == message.get("content"):
            return message
        self._condensed.add(content)
        return {**message, "content": content}

    def _split(self, message: Message) -> list[_Passage]:
        """Return the passages of a message; none if the message is kept as it is."""
        text = message.get("content")
        if message["role"] not in {"user", "tool"} or not isinstance(text, str) or text in self._condensed:
            return []
        head, body, tail = self._ends(text)
        passages = split_passages(body, self._max_chars, pattern=self._pattern)
        middle = [_Passage(passage, len(passage) >= self._min_chars) for passage in passages]
        return [_Passage(head, False), *middle, _Passage(tail, False)]

    def _ends(self, text: str) -> tuple[str, str, str]:
        """Return the first paragraph, the text between, and the last paragraph; an end may be empty."""
        gap = "\n\n" if "\n\n" in text else "\n"
        head = text.find(gap) + len(gap)
        head = head if len(gap) <= head <= self._keep_ends else 0
        tail = text.rfind(gap) + len(gap)
        tail = tail if tail > head and len(text) - tail <= self._keep_ends else len(text)
        return text[:head], text[head:tail], text[tail:]

    def _note(self, passage: str, short: str) -> str:
        """Return what the view shows in place of a passage, which is the passage if that is shorter."""
        space = passage[len(passage.rstrip()) :]
        note = f"[block {len(self.blocks) + 1}: {len(passage)} characters condensed]\n{short}{space}"
        if len(note) >= len(passage):
            return passage
        self.keep(passage)
        return note


class Keywords(Passages):
    """Condense passages to their keywords, without a model: long and rare words, names and numbers.

    Args:
        ratio: the keywords have at most this part of the passage's characters, as in 1 / `ratio`.
        settings: see `Passages`.

    Raises:
        UsageError: `ratio` is not above 1, or see `Passages`.
    """

    def __init__(
        self,
        *,
        ratio: float = 4.0,
        at: float = 0.75,
        max_chars: int = 2000,
        min_chars: int = 200,
        keep_ends: int = 400,
        pattern: str = "",
        opening: bool = True,
    ) -> None:
        super().__init__(
            at=at,
            max_chars=max_chars,
            min_chars=min_chars,
            keep_ends=keep_ends,
            pattern=pattern,
            opening=opening,
        )
        if not ratio > 1:
            raise UsageError(f"ratio must be above 1, not {ratio}")
        self._ratio = ratio

    async def condense(self, passages: Sequence[str]) -> Sequence[tuple[str, int]]:
        """Return the keywords of each passage."""
        return [(words, 0) for words in keywords_of(passages, self._ratio)]


class SummarisePassages(Passages):
    """Let a model summarise passages, all at once, and each text only once for all episodes.

    A summary that several episodes share counts for the token limit of each of them, so that an episode
    does not depend on which other one came first. New weights of the model begin anew.

    Args:
        engine: model that writes the summaries: a `ChatEngine`, an `Engine` with its `renderer`, or a
            `TextModel`.
        renderer: renderer of the engine, if the engine works on tokens.
        instructions: instructions for the model, which stand before each passage.
        sampling: sampling settings for a summary; without a seed it derives from the text.
        at, max_chars, min_chars, keep_ends, pattern, opening: see `Passages`.
    """

    def __init__(
        self,
        engine: Engine | ChatEngine | TextModel,
        *,
        renderer: Renderer | None = None,
        instructions: str = "Summarise this passage in one or two sentences. Keep every name and number.",
        sampling: Sampling | None = None,
        at: float = 0.75,
        max_chars: int = 2000,
        min_chars: int = 200,
        keep_ends: int = 400,
        pattern: str = "",
        opening: bool = True,
    ) -> None:
        super().__init__(
            at=at,
            max_chars=max_chars,
            min_chars=min_chars,
            keep_ends=keep_ends,
            pattern=pattern,
            opening=opening,
        )
        self._model = TextModel.of(engine, renderer, role="a summariser")
        self._instructions = instructions
        self._sampling = sampling or Sampling(max_tokens=128)
        self._shared = _Shared()

    async def condense(self, passages: Sequence[str]) -> Sequence[tuple[str, int]]:
        """Return a summary of each passage."""
        version = self._model.weights_version
        tasks = [
            asyncio.ensure_future(self._shared.get(version, text, lambda text=text: self._write(text)))
            for text in passages
        ]
        try:
            answers = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return [(answer.text.strip(), answer.usage.completion_tokens) for answer in answers]

    async def _write(self, text: str) -> Answer:
        sampling = self._sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=derive_seed("passage", text))
        asked: Message = {"role": "user", "content": f"{self._instructions}\n\n{text}"}
        return await self._model.ask([asked], sampling)


@dataclass(slots=True)
class _Writing:
    task: asyncio.Future[Answer]
    waiting: int = 0
    """Number of episodes that wait for the summary."""


class _Shared:
    """Summaries by text, which the copies of a condenser share."""

    # Invariant: a task that is not done has an episode that waits for it. It is cancelled with the last one,
    # so that no task outlives the event loop in which it runs.

    def __init__(self) -> None:
        self._version = 0
        self._written: dict[str, _Writing] = {}

    async def get(self, version: int, text: str, write: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Return the summary of a text, which is written if it is new or failed before."""
        if version != self._version or len(self._written) >= _MAX_KEPT:
            self._version, self._written = version, {}
        writing = self._written.get(text)
        if writing is None:
            writing = self._written[text] = _Writing(asyncio.ensure_future(write()))
        writing.waiting += 1
        try:
            # The task belongs to all episodes, so one that is cancelled must not cancel it.
            return await asyncio.shield(writing.task)
        except BaseException:
            abandoned = writing.waiting == 1 and not writing.task.done()
            if abandoned:
                writing.task.cancel()
            # A task that is done has failed here, so the next episode asks again.
            if (abandoned or writing.task.done()) and self._written.get(text) is writing:
                del self._written[text]
            raise
        finally:
            writing.waiting -= 1
